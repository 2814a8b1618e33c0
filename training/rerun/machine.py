"""Runs each step of a training under validation, and again where a result was rejected."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from . import state as saved_states
from .agreement import Ranks
from .case import Case
from .data_iterator import RerunDataIterator, iterators_in
from .evidence import (
    Evidence,
    Suspect,
    Verdict,
    found_again,
    found_in_first_run,
    looked_into,
    told_by,
    verdict_on,
)
from .hardware import hardware_name
from .injection import Injector, Moment, wrong
from .quick_stats import QuickStats, report_of
from .random_states import RandomStates
from .rewinding import StepBegin, UserState
from .samples import Samples
from .state import SavedState, mode_named
from .transitions import Found, Mode, Next, Phase, next_of, saved_phase
from .validation import (
    NONE,
    Result,
    Validation,
    Validations,
    is_rejected,
    kept,
    relative_difference,
)

_logger = logging.getLogger("sidestream")


class RejectedResultError(RuntimeError):
    """A fatal validation rejected a result, which this mode does not look into."""


class ExitDecision(NamedTuple):
    """What to do behind the loop of a step. code: of the process; 0 unless it is to `exit`."""

    checkpoint: bool = False
    exit: bool = False
    code: int = 0


@dataclass(slots=True)
class _Run:
    """A run of the step: its validations, and where the step began, unless it never runs again."""

    validations: Validations
    samples: Samples
    begin: StepBegin | None


class RerunStateMachine:
    """Tells what a step's wrong results are due to: a transient fault, hardware that fails, or the
    program.

        machine = RerunStateMachine(model)
        data = RerunDataIterator(loader)
        while machine.should_run_forward_backward(data):
            optimizer.zero_grad()
            loss = model(next(data)).mean()
            machine.validate_result(loss, torch.isnan, "loss")
            loss.backward()
        decision = machine.should_checkpoint_and_exit()
        if decision.checkpoint:
            ss.save_checkpoint(path, model, optimizer, extra=machine.state_dict())
        if decision.exit:
            sys.exit(decision.code)
        optimizer.step()

    A step with a rejected result runs again on the spot. If the result differs then, the fault was
    transient: training goes on with the results of the second run, or where the validation is fatal
    exits with code 17. If not, it exits with code 16, to be resumed from the checkpoint on other
    hardware. If the result differs there, the hardware is at fault, if not, the program is, or the
    result is correct: code 17, and `verdict`. On the same hardware once more: 16 again.

    Results are validated where they are: no validation waits for a device. At the end of a step
    there is one collective of all ranks, and one value that the host reads. Programs must make the
    same validations in a run again; results may differ within a validation's tolerance. All ranks
    run a step again together, and decide alike.

    Args:
        modules: whose buffers, gradients and wires are rewound (`sidestream.keep_step`), a module
            or several; parameters must not change inside the loop.
        mode: "validate_results", "disabled" or "report_determinism_stats"; the last two raise a
            `RejectedResultError` on all ranks where a fatal result is rejected.
        group: the ranks that run steps together; None: all, or this one where there is no group.
        state_save_func, state_restore_func: keep and bring back what else a step changes: the
            first returns what the other is given.
        hardware: of this rank; None: `hardware_name()`.
        program: names the program and what defines the run: a state of another one is refused.
        injector: makes results wrong, for tests.
        first_step: the number of the first step, unless a state is loaded.

    Raises:
        ValueError: an unknown mode.
    """

    def __init__(
        self,
        modules: nn.Module | Sequence[nn.Module] = (),
        *,
        mode: str = "validate_results",
        group: dist.ProcessGroup | None = None,
        state_save_func: Callable[[], Any] = lambda: None,
        state_restore_func: Callable[[Any], None] = lambda _: None,
        hardware: str | None = None,
        program: str = "",
        injector: Injector | None = None,
        first_step: int = 1,
    ) -> None:
        self._mode = mode_named(mode)
        self._modules = [modules] if isinstance(modules, nn.Module) else list(modules)
        self._user = UserState(state_save_func, state_restore_func)
        self._ranks = Ranks(group)
        self._hardware = hardware_name() if hardware is None else hardware
        self._program = program
        self._injector = injector
        self.step = first_step
        """The number of the step that runs, or of the next one."""
        self.verdict: Verdict | None = None
        """The last one, on all ranks; also one that a checkpoint brought."""
        self.determinism: dict[str, QuickStats] = {}
        """In mode "report_determinism_stats": by message, how much results of the two runs of a
        step have differed on this rank (by the validations' comparison functions)."""
        self._phase = Phase.IDLE
        self._case = Case(self._ranks.rank)
        self._samples = Samples()
        self._run: _Run | None = None
        self._first_calls: list[Validation] = []
        self._decision = ExitDecision()

    # ---- the loop of a step

    def should_run_forward_backward(
        self,
        data_iterator: RerunDataIterator | Sequence[RerunDataIterator | None] | None = None,
    ) -> bool:
        """Whether the step is to be run, for the first time or again; for all ranks to call.

        Raises:
            TypeError: an iterator that cannot be rewound, unless the mode is "disabled".
            RuntimeError: gradients wait for their exchange as a step begins; a microbatch was
                changed in place, and the step has to run again; a step that is run elsewhere makes
                other validations than it did.
            RejectedResultError: see `mode`.
            CommunicationError: another rank is gone.
        """
        if self._run is None:
            follows = next_of(self._mode, self._phase, Found.BEGINS)
            self._begin(iterators_in(data_iterator, must_rewind=self._mode is not Mode.DISABLED))
            self._phase = follows.phase
            return True
        found, evidence = self._find()
        follows = next_of(self._mode, self._phase, found)
        self._tell(follows, found, evidence)
        self._follow(follows, found, evidence)
        return follows.runs

    def should_checkpoint_and_exit(self) -> ExitDecision:
        """What to do after the loop: (checkpoint, exit, code), equal on all ranks. The checkpoint
        is of the state before the step, so no optimizer may have stepped.
        """
        return self._decision

    def _begin(self, iterators: Sequence[RerunDataIterator]) -> None:
        if self._case.random_states:
            RandomStates.restore_plain(self._case.random_states)
        for iterator in iterators:
            iterator.advance()
        is_kept = self._mode is not Mode.DISABLED
        begin = StepBegin.now(self._modules, iterators, self._user) if is_kept else None
        self._run = _Run(Validations(), self._samples.copy(), begin)
        self._decision = ExitDecision()

    def _find(self) -> tuple[Found, list[Evidence]]:
        """What this run says, and each rank's evidence, where anything was rejected."""
        assert self._run is not None, "a run has ended"
        validations = self._run.validations
        if not self._case.suspects:
            first, fatal = self._ranks.smallest(validations.firsts())
            found = found_in_first_run(is_rejected=first < NONE, is_fatal=fatal < NONE)
            if found is Found.ACCEPTED:
                return found, []
        evidence = self._ranks.gather(self._case.evidence(self._hardware, validations))
        if differ := [
            f"rank {n}: {one.mismatch}" for n, one in enumerate(evidence) if one.mismatch
        ]:
            raise RuntimeError(
                f"step {self.step}: expected the validations that it had when it was suspended; "
                f"{'; '.join(differ)}; run the program that saved the state, or do not load it"
            )
        if self._case.suspects:
            found = found_again(self._phase, self._case.suspects, evidence)
        return found, evidence

    # ---- what follows

    def _follow(self, follows: Next, found: Found, evidence: Sequence[Evidence]) -> None:
        run = self._run
        assert run is not None, "a run has ended"
        if self._mode is Mode.REPORT_DETERMINISM_STATS:
            self._compare_runs(run.validations)
        elif follows.runs:
            self._case = self._case.opened(evidence, run.validations)
        if follows.rewinds:
            assert run.begin is not None, "a mode that rewinds keeps where a step begins"
            self._samples = run.samples.copy()
            run.begin.rewind()
        self._phase = follows.phase
        if follows.runs:
            run.validations = Validations()
            return
        self._run = None
        self._conclude(follows, looked_into(found, self._case.suspects, evidence), evidence, run)
        if follows.raises:
            raise RejectedResultError(
                f"step {self.step}: expected results that validations accept, got "
                f"{'; '.join(told_by(evidence))}; mode='validate_results' finds out why"
            )
        if not follows.rewinds:
            self.step += 1

    def _conclude(
        self,
        follows: Next,
        suspects: tuple[Suspect, ...],
        evidence: Sequence[Evidence],
        run: _Run,
    ) -> None:
        """The step does not run again in this process."""
        if follows.verdict is not None:
            self.verdict = verdict_on(follows.verdict, self.step, suspects, evidence)
        code = follows.exit_code
        self._decision = ExitDecision(follows.saves, code is not None, code or 0)
        if follows.phase is not Phase.SUSPENDED:
            self._case = Case(self._ranks.rank)
        elif run.begin is not None:
            before = run.begin.random_states
            self._case = self._case.suspended(suspects, run.validations, before)

    def _compare_runs(self, validations: Validations) -> None:
        """Keep the results of the first run, and compare those of the second with them."""
        if self._phase is Phase.RERUN:
            for message, difference in validations.differences(self._first_calls):
                self.determinism.setdefault(message, QuickStats()).record([difference])
        self._first_calls = validations.calls if self._phase is Phase.FIRST_RUN else []

    def _tell(self, follows: Next, found: Found, evidence: Sequence[Evidence]) -> None:
        """Log on the first rank what was found, and what is done about it."""
        if evidence and self._ranks.rank == 0 and not follows.raises:
            told = "; ".join([found.value, *told_by(evidence), follows.told])
            _logger.warning("step %d: %s", self.step, told)

    # ---- validations

    def validate_result(
        self,
        result: Result,
        rejection_func: Callable[[Any], Any],
        message: str,
        comparison_func: Callable[[Any, Any], Any] | None = None,
        tolerance: float = 0.0,
        fatal: bool = True,
        *,
        shared: bool = False,
    ) -> None:
        """Have `result` validated: a number, or a tensor of real numbers on any device, which is
        copied, so best a few. Outside of the loop, as in an evaluation, nothing happens.

        Args:
            result: what this rank has computed, best before any sum over ranks.
            rejection_func: of `result`; a bool, or a tensor of bools, of which one is enough. To
                answer with a tensor where the result is one lets no host wait: `torch.isnan`.
            message: names the result, equal in all runs.
            comparison_func: how far the results of two runs are apart, a number or a tensor of one;
                None: the largest of 2 |a - b| / |a + b|.
            tolerance: how far apart is the same.
            fatal: training cannot go on, whatever it was due to.
            shared: all ranks' hardware has made the result, such as a gradient's norm.

        Raises:
            TypeError: a result that cannot be compared.
        """
        if self._run is None:
            return
        calls = self._run.validations.calls
        result = kept(result)
        if self._injector is not None and self._injector.is_wrong(self._moment(len(calls))):
            result = wrong(result)
        compare = relative_difference if comparison_func is None else comparison_func
        rejected = is_rejected(rejection_func(result))
        calls.append(Validation(result, rejected, message, compare, tolerance, fatal, shared))

    def is_unexpectedly_large(
        self,
        result: Result,
        threshold: float,
        context: str,
        num_samples: int = 100,
        resample: bool = False,
    ) -> torch.Tensor:
        """For a `rejection_func`: whether the magnitude of `result` is more than `threshold` times
        the largest among the first `num_samples` results of this `context`, or not finite. Of no
        dimension, where the result is. resample: begin with new samples.
        """
        return self._samples.is_unexpectedly_large(
            result, threshold, context, num_samples, resample=resample
        )

    def _moment(self, call: int) -> Moment:
        was_judged = self.verdict is not None and self.verdict.step == self.step
        is_first = self._phase is Phase.FIRST_RUN and not was_judged
        return Moment(self.step, self._ranks.rank, call, self._hardware, is_first)

    def determinism_report(self) -> str:
        """A line for each message: how far apart results of two runs were, on all ranks (a
        collective).
        """
        return report_of(self._ranks.gather(self.determinism))

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """All that is needed after a restart: plain values, under keys that are always the same.

        This rank's own: give each rank back what it saved, as `extra` of `save_checkpoint` does.
        In the middle of a step it is the state before the step.
        """
        run, phase = self._run, saved_phase(self._phase)
        saved = SavedState(
            **self._identity(),
            mode=self._mode.value,
            step=self.step,
            phase=phase.value,
            verdict=saved_states.plain_verdict(self.verdict),
            samples=(self._samples if run is None else run.samples).plain(),
            **(saved_states.plain_case(self._case) if phase is Phase.SUSPENDED else {}),
        )
        return saved.as_dict()

    def validate_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Check that `load_state_dict` would take it.

        Raises:
            ValueError: it is no such state, or one of another program, number of ranks or rank, or
                of another mode while a step waits for other hardware; with what differs.
        """
        saved = saved_states.parsed(state_dict)
        expected = self._identity()
        if saved.is_suspended:
            expected["mode"] = self._mode.value
        if found := saved_states.differences(expected, saved):
            fix = (
                f"; step {saved.step} waits to be run on other hardware: go on with as many ranks "
                "of the same program, each with what it saved"
                if saved.is_suspended
                else "; begin without it where samples and the last verdict may be lost"
            )
            raise ValueError(f"rerun state: {'; '.join(found)}{fix}")

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there, whatever this machine was doing. With another number of ranks begin
        without it, with `first_step`, unless it `has_open_question`.

        Raises:
            ValueError: see `validate_state_dict`; nothing has changed then.
        """
        self.validate_state_dict(state_dict)
        saved = saved_states.parsed(state_dict)
        self._case = saved_states.case_from(saved)
        self.verdict = saved_states.verdict_from(saved.verdict)
        self._samples = Samples.from_plain(saved.samples)
        self._phase, self.step = Phase(saved.phase), saved.step
        self._run = None
        self._decision = ExitDecision()

    def _identity(self) -> dict[str, Any]:
        return {
            "version": saved_states.VERSION,
            "program": self._program,
            "world_size": self._ranks.world_size,
            "rank": self._ranks.rank,
        }
