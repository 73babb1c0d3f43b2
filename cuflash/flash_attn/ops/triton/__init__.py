"""Operations that flash-attn writes in Triton; these need none."""
