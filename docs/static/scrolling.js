// Boxes that scroll take the focus, so that the arrow keys scroll them.
document.addEventListener("DOMContentLoaded", () => {
  for (const box of document.querySelectorAll("pre, .table-wrapper, .scroll")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  }
});
