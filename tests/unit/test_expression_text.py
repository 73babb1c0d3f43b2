"""What is written for a score and a mask."""

from cuflash.expressions import text, trace


def written(score_mod, dmods, **arrays):
    given = trace.Given(tuple(arrays.items()))
    score, _ = trace.record(score_mod, "score_mod", given)
    return text.text(score, None, tuple(arrays.values()), dmods)


def test_gradients_of_an_array_by_head():
    """No pair reads it, but each pair adds to its gradient."""

    def scaled(score, b, h, q_idx, kv_idx, *, factor):
        return score * factor[h]

    factor = trace.ArrayKind("float32", ndim=1)
    with_gradient = written(scaled, (0,), factor=factor)
    assert "args->dmods[0]" in with_gradient
    assert "const Arguments* args = nullptr;" in with_gradient
    without = written(scaled, (), factor=factor)
    assert "Arguments* args" not in without
