// A row for each op of two runs, and the panel beside them: what was clicked, or the comparison as a whole.

const HEADS = ["a", "b", "apart", "own error", "error so far"];
const alone = (row) => (row.b ? (row.a ? "" : "b") : "a");
const body = $("rows").tBodies[0];
let shown = [], chosen = null;

const rows = data.rows.map((row, id) => {
  const first = id === data.first, why = first ? data.why : row.why;
  const texts = [row.op, row.module, row.source, row.a?.dtype, row.b?.dtype, why, row.backward && "backward", alone(row) && `${alone(row)} alone`];
  return { ...row, id, first, why, text: texts.filter(Boolean).join(" ").toLowerCase() };
});

function element(row) {
  const made = make("tr", `${row.why ? "differs" : ""}${row.first ? " first" : ""}`, make("td", "", ...names(row)), ...cells(row));
  made.id = `op${row.id}`;
  made.setAttribute("aria-selected", "false");
  made.onclick = () => choose(row);
  return made;
}

function names(row) {
  const words = [make("span", "name", plain(row.op)), make("span", "dim", row.module), make("span", "dim", row.backward ? "backward" : ""), make("span", "dim", row.line),
    row.first ? make("span", "badge differs first", "first difference") : row.why ? make("span", "badge differs", "differs") : "",
    alone(row) && make("span", "badge", `in ${alone(row)} alone`)];
  return words.filter((word) => word && word.textContent).flatMap((word, i) => (i ? [" ", word] : [word]));
}

function cells(row) {
  const sides = [row.a, row.b].map((side) => (side ? [chip(side.dtype), " ", make("span", "dim", side.norm)] : ["\u2013"]));
  const found = row.limits ? measures(row).map((measure) => [limited(measure)]) : [[], [], []];
  return [...sides, ...found].map((children, i) => {
    const cell = make("td", i > 2 ? "wide" : "", ...children);
    cell.dataset.head = HEADS[i];
    return cell;
  });
}

// What was found, the most that it may be, and whether it is more.
const measures = (row) => [[row.apart], [row.a.alone, row.b.alone], row.so_far].map((found, i) => ({ found, limit: row.limits[i], over: row.exceeds[i] }));

function limited({ found, limit, over }) {
  if (!limit) return make("span", "dim", found.some(Boolean) ? found.map((each) => each || "\u2013").join(", ") : "not measured");
  return make("span", "", make("span", over ? "over" : "", found.join(", ")), make("span", over ? "over" : "dim", ` ${over ? ">" : "\u2264"} ${limit}`));
}

function draw() {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean), which = $("which").value;
  shown = rows.filter((row) => (which === "all" || (which === "differ" ? row.why : alone(row))) && words.every((word) => row.text.includes(word)));
  body.replaceChildren(...shown.map((row) => row.element));
  $("count").textContent = `${shown.length} of ${rows.length} ops`;
  $("empty").hidden = shown.length > 0;
  mark();
}

function mark() {
  const entry = shown.includes(chosen) ? chosen : shown[0];
  shown.forEach((row) => {
    row.element.classList.toggle("chosen", row === chosen);
    row.element.setAttribute("aria-selected", row === chosen);
    row.element.tabIndex = row === entry ? 0 : -1;
  });
}

function choose(row, reveal) {
  chosen = row;
  fillDetails(row ? ofRow(row) : ofComparison());
  if (row) rememberAddress(`#op${row.id}`);
  if (reveal && !shown.includes(row)) {
    $("search").value = "";
    $("which").value = "all";
    draw();
  } else mark();
  if (reveal) row.element.scrollIntoView({ block: "center" });
}

function ofRow(row) {
  const [apart, own, soFar] = row.limits ? measures(row) : [];
  return [make("h2", "", plain(row.op)),
    ...(row.first ? [make("p", "over", `first difference${alone(row) && `, in ${alone(row)} alone`}: ${row.why}`)] : row.why ? [make("p", "over", row.why)] : alone(row) ? [make("p", "over", `in ${alone(row)} alone`)] : []),
    list(["module", row.module], ["line", row.a?.source || row.source], ["line in b", row.a && row.b && row.a.source !== row.b.source && row.b.source], ["direction", row.backward ? "backward" : "forward"], ["shape", shape((row.a || row.b).shape)]),
    make("table", "", line("th", "", "a", "b"), ...[["dtype", "dtype"], ["norm", "norm"], ["own error", "alone"], ["from start", "from_start"]]
      .map(([head, key]) => line("td", head, ...[row.a, row.b].map((side) => (side ? side[key] || "not measured" : "\u2013"))))),
    ...(row.limits ? [make("h3", "", "differences, and what rounding may add"),
      list(["apart", limited(apart)], ["own error", limited(own)], ["so far", limited(soFar)])] : [])];
}

const line = (tag, ...texts) => make("tr", "", ...texts.map((each) => make(tag, "", each)));

function ofComparison() {
  const [first, ...others] = data.headlines;
  const settings = data.settings.map(([name, a, b]) => {
    const made = line("td", name, a, b);
    if (a !== b) made.className = "changed";
    return made;
  });
  return [make("h2", "", data.agree ? "The runs agree but for rounding" : "The runs differ"), make("p", data.first === null ? "" : "over", first), jumpToFirst(make("a", "", "show it")),
    ...others.map((text) => make("p", "", text)), make("table", "", line("th", "", "a", "b"), ...(data.files.some(Boolean) ? [line("td", "file", ...data.files)] : []), ...settings),
    make("h3", "", "legend"),
    ...unique(rows.flatMap((row) => [row.a?.dtype, row.b?.dtype])).filter(Boolean).sort().map((dtype) => make("div", "line", chip(dtype), ` computed in ${NAMES[dtype] || dtype}`)),
    list(["norm", "of the op's result in float64, which runs beside"], ["apart", "distance of the two runs in float64, of their norm: more than the limit, and they compute something else"],
      ["own error", "of the op alone, against float64 on its own operands"], ["so far", "largest error against the run in float64 from the start, until here"],
      ["\u2264, >", "within the limit that rounding sets, or beyond it"]),
    make("p", "dim", "Click a row for all its numbers; arrow keys, Home and End move on, Escape leads back here. What follows the first difference mostly differs for its sake.")];
}

function jumpToFirst(anchor) {
  anchor.href = `#op${data.first}`;
  anchor.onclick = (event) => { event.preventDefault(); choose(rows[data.first], true); rows[data.first].element.focus(); };
  anchor.hidden = data.first === null;
  return anchor;
}

jumpToFirst($("first"));
$("search").oninput = $("which").onchange = draw;
document.onkeydown = (event) => {
  if (event.key === "Escape") choose(null);
  if (["INPUT", "SELECT", "BUTTON", "A"].includes(event.target.tagName)) return;
  const at = shown.indexOf(chosen);
  const next = shown[{ ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: shown.length - 1, Enter: shown.findIndex((row) => row.element === event.target) }[event.key]];
  if (!next) return;
  event.preventDefault();
  choose(next);
  next.element.focus();
  next.element.scrollIntoView({ block: "nearest" });
};

function chooseLinked() {
  const row = rows[/^#op(\d+)$/.exec(location.hash)?.[1]];
  if (row) choose(row, true);
}

rows.forEach((row) => { row.element = element(row); });
draw();
choose(null);
chooseLinked();
