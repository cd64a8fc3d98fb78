"""Hooks act in the passes of their own block: not in other threads, nor in passes of a hook."""

from threading import Thread

import pytest
import torch
from torch import nn

from bilens.hooks import first_call, hooked


def test_hooks_act_in_their_block_and_thread_only():
    module, x, of_thread = nn.Identity(), torch.ones(2), []

    def double(_, args, options):
        return (2 * args[0],), options

    with hooked(before=[(module, double)]), hooked(after=[(module, lambda *call: call[-1] + 1)]):
        assert module(x).tolist() == [3.0, 3.0]
        thread = Thread(target=lambda: of_thread.append(module(x)))
        thread.start()
        thread.join()
    torch.testing.assert_close(of_thread, [x])
    torch.testing.assert_close(module(x), x)
    assert not module._forward_hooks
    assert not module._forward_pre_hooks


def test_a_pass_that_a_hook_makes_itself_is_plain():
    module, x = nn.Identity(), torch.ones(2)
    with hooked(after=[(module, lambda module, args, _, output: module(args[0]) + output + 1)]):
        assert module(x).tolist() == [3.0, 3.0]


def test_calls_before_it_are_skipped():
    module, x = nn.Linear(2, 2), torch.ones(2)
    (found,), _ = first_call(module, lambda: module(module(x)), skipped=1)
    assert torch.equal(found, module(x))


def test_a_run_ends_at_the_first_call():
    first, second = nn.Identity(), nn.Identity()

    def run():
        second(first(torch.ones(2)) + 1)
        raise AssertionError("the run goes on")

    args, options = first_call(second, run)
    assert (args[0].tolist(), options) == ([2.0, 2.0], {})
    with pytest.raises(RuntimeError), hooked(before=[(first, lambda *_: 1 / 0)]):
        raise RuntimeError
    assert not first._forward_pre_hooks
