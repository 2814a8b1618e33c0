"""The network of `bench network` as data: what is made, in which order, and whose it is."""

import pytest

from sidestream.bench.network_plan import Owner, left_behind, plan_network, removal

OWNER = Owner(pid=41, start_ticks=7)


def test_two_ranks_are_joined_by_one_pair():
    plan = plan_network(OWNER, 2, 250_000_000)
    bucket = "dev lan root tbf rate 250000000bit burst 131072 latency 20ms"
    assert [" ".join(command) for command in plan.make] == [
        "ip netns add sidestream-41-7-rank0",
        "ip netns add sidestream-41-7-rank1",
        "ip link add lan netns sidestream-41-7-rank0 type veth "
        "peer name lan netns sidestream-41-7-rank1",
        "ip -n sidestream-41-7-rank0 addr add 10.77.0.1/24 dev lan",
        "ip -n sidestream-41-7-rank1 addr add 10.77.0.2/24 dev lan",
        "ip -n sidestream-41-7-rank0 link set lan up",
        "ip -n sidestream-41-7-rank1 link set lan up",
        f"tc -n sidestream-41-7-rank0 qdisc add {bucket}",
        f"tc -n sidestream-41-7-rank1 qdisc add {bucket}",
    ]
    assert plan.namespaces == plan.ranks == ("sidestream-41-7-rank0", "sidestream-41-7-rank1")
    assert " ".join(removal(plan.ranks[1])) == "ip netns delete sidestream-41-7-rank1"


@pytest.mark.parametrize("num_ranks", [3, 64])
def test_more_ranks_have_a_switch_and_every_end_is_shaped(num_ranks):
    plan = plan_network(OWNER, num_ranks, 10_000_000_000)
    switch = "sidestream-41-7-switch"
    assert plan.namespaces == (*plan.ranks, switch)
    assert len({*plan.ranks}) == num_ranks
    ends = [(name, "lan") for name in plan.ranks]
    ends += [(switch, f"port{rank}") for rank in range(num_ranks)]
    shaped = [(command[2], command[6]) for command in plan.make if command[0] == "tc"]
    assert sorted(shaped) == sorted(ends)
    for command in plan.make:  # a millisecond of 10 Gbit/s
        assert command[0] == "ip" or command[-3] == "1250000"
    masters = [command[5] for command in plan.make if "master" in command]
    assert masters == [f"port{rank}" for rank in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_nothing_is_made_in_the_machines_own_namespace(num_ranks):
    plan = plan_network(OWNER, num_ranks, 1_000_000)
    made: set[str] = set()
    for command in plan.make:
        words = set(command)
        if command[:3] == ("ip", "netns", "add"):
            made.add(command[3])
        elif command[1] == "-n":
            assert command[2] in made
        else:  # a pair: both of its ends are elsewhere
            assert command[:3] == ("ip", "link", "add")
            assert command.count("netns") == 2
            assert len(words & made) == 2
    assert made == set(plan.namespaces)


def test_what_an_ended_process_left_is_told_from_what_is_in_use():
    mine, again, ended = OWNER, Owner(41, 8), Owner(42, 7)
    names = [
        owner.namespace(role) for owner in (mine, again, ended) for role in ("rank10", "switch")
    ]
    strangers = ["blue", "sidestream", "sidestream-42-7-router", "sidestream-42-7-rank0-old"]
    found = left_behind([*strangers, *names], lambda owner: owner == mine)
    assert found == [
        owner.namespace(role) for owner in (again, ended) for role in ("rank10", "switch")
    ]
