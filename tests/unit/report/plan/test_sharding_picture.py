"""The picture of a sharding plan and the page around it."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

pytest.importorskip("scipy", reason="planning needs the extra nostall[sharding]")

from nostall.parallel.sharding.cost.device_mesh import ClusterMesh
from nostall.parallel.sharding.cost.prices import Prices
from nostall.parallel.sharding.planners.sharding import Options, ShardingPlan, plan_sharding
from nostall.report.plan.sharding import sharding_page, sharding_picture
from tests.unit.parallel.sharding.cost.test_prices import CLUSTER, RATES, _linear

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def plans() -> tuple[ShardingPlan, list[ShardingPlan]]:
    return plan_sharding(Prices(_linear(), ClusterMesh(CLUSTER, (2,)), RATES), Options())


def test_the_header_has_the_step_beside_data_parallelism(
    plans: tuple[ShardingPlan, list[ShardingPlan]],
) -> None:
    plan, others = plans
    peer = next(other for other in others if other.name == "data-parallel")
    words = "".join(ElementTree.fromstring(sharding_picture(plan, others)).itertext())
    gain = f"{peer.step_s / plan.step_s:.2f}"
    said = "no faster than" if gain == "1.00" else f"{gain}× as fast as"
    assert re.search(rf"modelled step \S+ \w+\s+{said} data parallelism \(", words)
    assert "data parallelism" not in sharding_picture(plan)


def test_lines_begin_after_labels_and_the_legend_fits_a_telephone(
    plans: tuple[ShardingPlan, list[ShardingPlan]],
) -> None:
    picture = ElementTree.fromstring(sharding_picture(*plans))
    labels = {
        int(text.get("y", 0)): float(text.get("x", 0)) + 5 * len(text.text or "")
        for text in picture.iter(f"{SVG}text")
        if text.get("class") == "soft"
    }
    starts = re.findall(
        r"M(\d+),([\d.]+) C", "".join(p.get("d", "") for p in picture.iter(f"{SVG}path"))
    )
    across = [(int(x), float(y)) for x, y in starts if int(x) < 510 and int(x) > 270]
    assert across
    assert all(x >= labels[round(y) + 3] for x, y in across)
    legend = [t for t in picture.iter(f"{SVG}text") if 60 < int(t.get("y", 0)) < 125]
    assert len(legend) == 6
    assert max(int(t.get("x", 0)) + 6 * len(t.text or "") for t in legend) <= 390


def test_the_page_has_the_cards_tables_and_the_command_that_runs_the_plan(
    plans: tuple[ShardingPlan, list[ShardingPlan]],
) -> None:
    page = sharding_page(*plans, "nostall launch a.json")
    assert "<code>nostall launch a.json</code>" in page
    for text in ("step, modelled", "data parallelism: ", "Collectives of a step", "<svg", "S(0)"):
        assert text in page
    assert "next step" not in sharding_page(*plans, "")
    styles = page[page.index("<svg") :].partition("<style>")[2].partition("</style>")[0]
    assert ":root" not in styles and not re.search(
        r"[}^](text|\.\w+)\{", styles.replace(".sharding{", "")
    )
