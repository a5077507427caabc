for (const figure of document.querySelectorAll("svg.fusion")) {
  const items = new Map([...figure.querySelectorAll("[data-item]")].map((item) => [item.dataset.item, item]));
  const mark = (number, on) => {
    items.get(number).classList.toggle("hot", on);
    for (const flow of figure.querySelectorAll(".flow")) {
      if (flow.dataset.from !== number && flow.dataset.to !== number) continue;
      flow.classList.toggle("hot", on);
      items.get(flow.dataset.from === number ? flow.dataset.to : flow.dataset.from).classList.toggle("hot", on);
    }
  };
  for (const [number, item] of items) {
    item.addEventListener("pointerenter", () => mark(number, true));
    item.addEventListener("pointerleave", () => mark(number, false));
  }
}
