"""scripts/train_forces.py: its gradients, dense attention, and its picture."""

import numpy as np
import pytest

import cuflash
import train_forces
from force_parts import dense, morse, potential
from helpers.compare import assert_allclose

STEP = 1e-6  # of central differences: their error is of its square
ATOMS = 6


@pytest.fixture
def case():
    """Parameters, positions and forces to learn."""
    r = morse.configurations(2, ATOMS, seed=0)
    return potential.new_parameters(3, 5, seed=1), r, morse.forces(r)


def moved(parameters, name, by):
    """Parameters of which one is moved, and the direction."""
    x = parameters[name]
    direction = np.random.default_rng(2).standard_normal(x.shape)
    return {**parameters, name: x + by * direction}, direction


@pytest.mark.parametrize("name", ["log_a", "w1", "b1", "w2"])
def test_gradients_of_the_loss(case, name):
    parameters, r, target = case
    _, gradients, _ = potential.step(parameters, r, target, cuflash)
    losses = []
    for by in (STEP, -STEP):
        there, direction = moved(parameters, name, by)
        losses.append(potential.step(there, r, target, cuflash)[0])
    slope = (losses[0] - losses[1]) / (2 * STEP)
    # Losses of size 10 are rounded to 1e-15, divided by 2e-6: 1e-8.
    assert_allclose(
        (gradients[name] * direction).sum(),
        slope,
        "direction",
        rtol=1e-05,
        atol=1e-7,
    )


@pytest.mark.parametrize("of", ["potential", "morse"])
def test_forces_are_slopes_of_the_energy(case, of):
    parameters, r, target = case
    direction = np.random.default_rng(3).standard_normal(r.shape)
    forces = target
    energy = morse.energy
    if of == "potential":
        *_, forces = potential.step(parameters, r, target, cuflash)

        def energy(r):
            return potential.energy(parameters, r, cuflash).sum()

    ahead, behind = (energy(r + by * direction) for by in (STEP, -STEP))
    slope = (ahead - behind) / (2 * STEP)
    # Energies of size 100 are rounded to 1e-14, divided by 2e-6: 1e-8.
    assert_allclose(
        -(forces * direction).sum(), slope, "forces", rtol=1e-05, atol=1e-7
    )


def test_moved_and_turned_atoms(case):
    parameters, r, _ = case
    turn, _ = np.linalg.qr(np.random.default_rng(4).standard_normal((3, 3)))
    before, after = (
        potential.energy(parameters, x, cuflash) for x in (r, r @ turn + 0.5)
    )
    # Scores of size 100, of a sum of 4 products: 400 * 2^-53, exponentials.
    assert_allclose(before, after, "before", atol=1e-11)


def test_a_dense_step_is_the_same(case):
    losses, gradients, forces = zip(
        *(potential.step(*case, calls) for calls in (cuflash, dense)),
        strict=True,
    )
    # Scores of size 100 are rounded to 1e-14; sums of some hundred products.
    assert_allclose(*losses, name="losses", rtol=1e-11, atol=1e-08)
    assert_allclose(*forces, name="forces", atol=1e-11)
    for name, x in gradients[0].items():
        assert_allclose(x, gradients[1][name], name, atol=1e-11)


def test_the_script(tmp_path, capsys):
    picture = tmp_path / "new" / "forces.png"
    options = "--steps 20 --atoms 8 --seqlens 8 16 --rounds 1"
    options += " --largest-dense 8 --output"
    assert train_forces.main([*options.split(), str(picture)]) == 0
    text = capsys.readouterr().out
    assert picture.exists() and text.splitlines()[-1] == str(picture)
    rows = [x.split() for x in text.splitlines()]
    measured = [x[:2] for x in rows if len(x) == 4 and x[0].isdigit()]
    assert measured == [["8", "cuflash"], ["8", "dense"], ["16", "cuflash"]]


def test_forces_are_learned():
    from force_parts import training

    errors, _ = training.train(cuflash, 8, 40, lambda *_: None)
    assert errors[-1, 1] < errors[0, 1] / 2  # 0.16 and 0.86 when written
