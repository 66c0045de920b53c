"""The figures, in the order in which the page shows them and the lab measures them."""

from __future__ import annotations

from experiments.plan import Figure

from . import (
    budgets,
    fairness,
    fig02,
    fig03,
    fig07,
    fig08,
    fig09,
    fig10,
    fig13,
    fig15,
    fig16,
    fig20,
    fig21,
    isolation,
    levers,
    napi_forward,
    napi_isolation,
    native,
    no_harm,
    peers,
    profile,
    seed002,
)

FIGURES: tuple[Figure, ...] = (
    native.FIGURE,
    no_harm.FIGURE,
    peers.FIGURE,
    peers.BOOKWORM_FIGURE,
    profile.FIGURE,
    levers.HOST,
    levers.GUEST,
    fig02.FIGURE,
    fig03.FIGURE,
    budgets.FIG04,
    budgets.FIG05,
    budgets.FIG06,
    fig15.FIGURE,
    fig16.FIGURE,
    isolation.FIGURE,
    fig13.FIGURE,
    fig09.FIGURE,
    fairness.FIGURE,
    fig20.FIGURE,
    fig21.FIGURE,
    seed002.FIGURE,
    fig07.FIGURE,
    fig08.FIGURE,
    fig10.FIGURE,
    *napi_forward.FIGURES,
    *napi_isolation.FIGURES,
)
