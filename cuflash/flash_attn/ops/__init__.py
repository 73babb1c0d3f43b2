"""Operations, under the names of flash-attn's packages."""
