"""Traffic of HLO texts that were written for the test, with loops."""

import pytest

from orchestra_jax.plan.collectives import collective_bytes

MODULE = """HloModule jit_step

%body (p: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %p = (s32[], f32[8,4]) parameter(0)
  %w = f32[2,4] constant({...})
  %g = f32[8,4] all-gather(f32[2,4] %w), channel_id=1, replica_groups=[1,4]<=[4], dimensions={0}
  ROOT %t = (s32[], f32[8,4]) tuple(%p, %g)
}

%condition (p: (s32[], f32[8,4])) -> pred[] {
  %p = (s32[], f32[8,4]) parameter(0)
  %n = s32[] constant(36)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (a: bf16[16,4]) -> f32[8,4] {
  %a = bf16[16,4] parameter(0)
  %r = bf16[16,4] all-reduce(bf16[16,4] %a), channel_id=2, replica_groups={{0,1,2,3}}, to_apply=%add
  %s = f32[2,4] reduce-scatter(f32[8,4] %b), replica_groups=mesh['x'=2,'y'=4] {'y'}, dimensions={0}, to_apply=%add
  %w = (s32[], f32[8,4]) while(%t), condition=%condition, body=%body
  ROOT %x = f32[8,4] get-tuple-element(%w), index=1
}
"""


def test_loops_multiply_and_kinds_count_by_what_travels():
    assert collective_bytes(MODULE) == {
        "all-gather": 36 * 8 * 4 * 4,
        "all-reduce": 2 * 16 * 4 * 2,
        "reduce-scatter": 4 * 2 * 4 * 4,
    }


def test_what_is_no_program_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        collective_bytes("nothing here")
