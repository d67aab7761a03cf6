
"use strict";
// The page says all it has without this: it adds the filter, and opens what a link leads to.
(function () {
  const found = [...document.querySelectorAll("#findings details.finding")];
  const form = document.querySelector("form.filter");
  const get = (id) => document.getElementById(id);

  function openTarget() {
    const target = get(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    for (let each = target; each; each = each.parentElement) {
      if (each.tagName === "DETAILS") each.open = true;
    }
    target.scrollIntoView();
    const summary = target.querySelector("summary");
    if (target.tagName === "DETAILS" && summary) summary.focus({ preventScroll: true });
  }
  addEventListener("hashchange", openTarget);
  if (location.hash) openTarget();
  if (!form) return;

  const fields = ["text", "action", "change", "chip"].map((name) => get("filter-" + name));
  let texts = null; // of all findings, once somebody looks for a word

  function filter() {
    const [text, action, change, chip] = fields.map((field) => field.value);
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    if (words.length) texts ??= found.map((each) => each.textContent.toLowerCase());
    let count = 0;
    found.forEach((each, index) => {
      const chips = each.dataset.chips.split(", ");
      const shown = words.every((word) => texts[index].includes(word)) &&
        (!action || each.dataset.action === action) &&
        (!change || each.dataset.change === change) &&
        (!chip || chips.includes("everywhere") || chips.includes(chip));
      each.hidden = !shown;
      count += shown;
    });
    const filtered = count < found.length;
    for (const group of document.querySelectorAll("#findings details.group")) {
      group.hidden = !group.querySelector("details.finding:not([hidden])");
      if (filtered && !group.hidden) group.open = true;
    }
    get("shown").textContent = filtered ? `${count} of ${found.length} findings` : `${found.length} findings`;
  }

  function setAll(open) {
    for (const each of found) if (!each.hidden) each.open = open;
    for (const each of document.querySelectorAll("#findings details.group")) each.open = open;
  }
  form.hidden = false;
  for (const name of ["input", "change"]) form.addEventListener(name, filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  get("open-all").addEventListener("click", () => setAll(true));
  get("close-all").addEventListener("click", () => setAll(false));
  filter();
})();
