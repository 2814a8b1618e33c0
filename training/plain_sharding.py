"""temporary seam"""

from contextlib import nullcontext
import torch


class MixedPrecisionPolicy:
    def __init__(self, **k):
        pass


def fully_shard(m, o, **k):
    return m, o


def no_sync(m):
    return nullcontext()


def clip_grad_norm_(m, x):
    return torch.nn.utils.clip_grad_norm_(m.parameters(), x)


def full_state_dict(m):
    return m.state_dict()


def save_checkpoint(p, m, o, extra=None):
    torch.save([m.state_dict(), o.state_dict(), extra], p / "x.pt")


def load_checkpoint(p, m, o):
    a, b, c = torch.load(p / "x.pt")
    m.load_state_dict(a)
    o.load_state_dict(b)
    return c


def summary(m):
    return None
