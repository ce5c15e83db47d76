// Tables that have no room are stacked: see site.css.
function stack() {
  for (const table of document.querySelectorAll("table.docutils:not(.sides), .cell_output table")) {
    table.classList.remove("stacked");
    const room = table.parentElement.clientWidth;
    if (!room || table.scrollWidth <= room + 1) continue;
    const heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent.trim());
    for (const row of table.querySelectorAll("tbody tr"))
      [...row.children].forEach((cell, place) => (cell.dataset.head = place ? (heads[place] ?? "") : ""));
    table.classList.add("stacked");
  }
}
addEventListener("DOMContentLoaded", stack);
addEventListener("load", stack);
addEventListener("resize", stack);
document.addEventListener("toggle", stack, true); // a part that was folded
