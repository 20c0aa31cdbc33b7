// What is drawn, and what a click does.

const HEIGHT = 24;
let rows = [], drawn = [], chosen = null;

function draw() {
  const { rows: now, found } = visible();
  rows = now;
  drawn = filter.sorted ? [] : edges(rows, found);
  $("rows").replaceChildren(...rows.map((row) => ({ op: opRow, block: blockRow, end: endRow })[row.kind](row)));
  const counted = (listed) => [...listed].filter((op) => op.op !== "returned").length;
  $("count").textContent = `${counted(found)} of ${counted(ops)} ops`;
  $("empty").hidden = rows.length > 0;
  mark();
}

function placed(item, cls, ...children) {
  const row = make("div", `row ${cls}`, ...children), depth = filter.sorted ? 0 : item.depth;
  row.style.setProperty("--depth", depth);
  row.setAttribute("role", "treeitem");
  row.setAttribute("aria-level", depth + 1);
  return row;
}

function opRow(op) {
  const name = op.label ? [make("span", "name", op.label), make("span", "dim", plain(op.op))] : [make("span", "name", plain(op.op))];
  const row = placed(op, "op", chip(op.dtype), ...name, make("span", "dim", shape(op.shape)), make("span", "tags", ...op.casts.map(tag)));
  if (filter.sorted) row.append(make("span", "dim", op.module));
  row.dataset.op = op.name;
  row.onclick = () => choose(op);
  return row;
}

function tag(cast) {
  const element = make("span", `tag${running(cast) ? "" : " idle"}`, `${cast.of} ${human(cast.bytes)}`);
  element.style.setProperty("--from", colour(cast.from));
  element.style.setProperty("--to", colour(cast.to));
  element.title = `${cast.of} ${cast.from} to ${cast.to}, ${cast.fate.join(", ")}`;
  element.dataset.cast = cast.id;
  element.onclick = (event) => { event.stopPropagation(); choose(cast); };
  return element;
}

function blockRow(b) {
  const inside = unique(b.ops.flatMap((op) => op.casts));
  const share = make("span", "share", ...unique(b.ops.map((op) => op.dtype)).sort().map((dtype) => {
    const part = make("i");
    part.style.flexGrow = b.ops.filter((op) => op.dtype === dtype).length;
    part.style.setProperty("--c", colour(dtype));
    return part;
  }));
  const open = b.open || searching();
  const row = placed(b, "block", make("span", "toggle", open ? "\u25be" : "\u25b8"), make("span", "name", b.key), share,
    make("span", "dim", [b.note, `${b.ops.length} ops`, inside.length && `${inside.length} casts`, inside.length && human(size(inside))].filter(Boolean).join(", ")));
  row.dataset.module = b.path;
  row.setAttribute("aria-expanded", open);
  row.onclick = () => { b.open = !b.open; choose(b); draw(); };
  return row;
}

const endRow = (end) => placed(end, "end", end.text.split("\n")[0]);

// Curves in the gutter; a diamond marks the casts on one.
function mark() {
  const near = new Set(chosen?.kind === "op" ? [...chosen.users, ...chosen.reads.map((read) => read.from)] : chosen?.kind === "cast" ? chosen.readers : []);
  [...$("rows").children].forEach((element, i) => {
    element.classList.toggle("chosen", rows[i] === chosen);
    element.setAttribute("aria-selected", rows[i] === chosen);
    element.tabIndex = rows[i] === (rows.includes(chosen) ? chosen : rows[0]) ? 0 : -1;
    element.classList.toggle("near", near.has(rows[i]));
    element.querySelectorAll(".tag").forEach((t) => t.classList.toggle("chosen", chosen?.kind === "cast" && Number(t.dataset.cast) === chosen.id));
  });
  const gutter = $("edges").getBoundingClientRect().width;
  const paths = drawn.map((edge, i) => curve(edge, i, gutter));
  const order = (cls) => (cls.includes("chosen") ? 2 : cls.includes("cast") ? 1 : 0);
  paths.sort((a, b) => order(a) - order(b));
  $("edges").style.height = `${rows.length * HEIGHT}px`;
  $("edges").innerHTML = paths.join("");  // numbers and our own words, nothing of the data
  $("edges").querySelectorAll(".mark").forEach((m) => { m.onclick = () => { const { casts: on } = drawn[m.dataset.edge]; choose(on.length > 1 ? drawn[m.dataset.edge] : on[0]); }; });
}

function curve(edge, i, gutter) {
  const busy = edge.casts.filter(running), some = busy.length ? busy : edge.casts;
  const thick = some.length ? Math.min(7, 1 + Math.log2(1 + size(some) / 2048) / 2) : 1;
  const on = chosen && (edge.casts.includes(chosen) || (chosen.kind === "op" && edge.ends.includes(chosen) && touches(edge)) || sameEdge(edge));
  const state = (busy.length || !some.length ? "" : " idle") + (some.length ? " cast" : "") + (on ? " chosen" : "");
  const style = some.length ? ` style="--c:${colour(some[0].to)}"` : "";
  const x = gutter - 4, y = edge.to * HEIGHT + HEIGHT / 2, s = 3 + thick / 2;
  const from = edge.from === null ? null : edge.from * HEIGHT + HEIGHT / 2;
  const bend = from === null ? 22 : Math.min(gutter * 1.2, 16 + 12 * Math.sqrt(edge.to - edge.from));
  const line = from === null ? `M${x - bend} ${y}H${x}` : `M${x} ${from}C${x - bend} ${from} ${x - bend} ${y} ${x} ${y}`;
  const [mx, my] = from === null ? [x - bend, y] : [x - 0.75 * bend, (from + y) / 2];
  const diamond = `<path class="mark${state}" data-edge="${i}"${style} d="M${mx} ${my - s}l${s} ${s}l${-s} ${s}l${-s} ${-s}z"/>`;
  return `<path class="edge${state}"${style} stroke-width="${thick.toFixed(1)}" d="${line}"/>${some.length ? diamond : ""}`;
}

const touches = (edge) => rows[edge.to] === chosen || (edge.from !== null && rows[edge.from] === chosen);
const sameEdge = (edge) => chosen.kind === "edge" && edge.from === chosen.from && edge.to === chosen.to;

function choose(item, reveal) {
  chosen = item;
  describe();
  rememberAddress(anchor(item));
  if (reveal) {
    const op = item.kind === "cast" ? item.readers[0] : item;
    if (!op) return mark();  // the cast of a result stands in no graph
    if (!matches(op)) forget();
    blocks.filter((b) => b.ops.includes(op)).forEach((b) => { b.open = true; });
    draw();
    $("rows").children[rows.indexOf(op)].scrollIntoView({ block: "center" });
  } else mark();
}

const anchor = (item) => (item.kind === "op" || item.kind === "cast" ? `#${item.kind}${item.id}` : "");

function chooseLinked() {
  const linked = /^#(op|cast)(\d+)$/.exec(location.hash);
  const item = linked && (linked[1] === "op" ? ops : casts)[linked[2]];
  if (item) choose(item, true);
}

function forget() {
  Object.assign(filter, { words: [], casts: "", sorted: false, dtype: "" });
  $("search").value = $("casts").value = "";
  $("sort").setAttribute("aria-pressed", "false");
  pressOnly("");
}

function pressOnly(dtype) {
  $("dtypes").classList.toggle("one", dtype !== "");
  $("dtypes").childNodes.forEach((button) => button.setAttribute("aria-pressed", String(button.innerText === dtype)));
}

$("dtypes").append(...unique(ops.map((op) => op.dtype)).filter(Boolean).sort().map((dtype) => {
  const button = chip(dtype, "button");
  button.title = `only ops in ${NAMES[dtype] || dtype}; again: all`;
  button.setAttribute("aria-pressed", "false");
  button.onclick = () => {
    filter.dtype = filter.dtype === dtype ? "" : dtype;
    pressOnly(filter.dtype);
    draw();
  };
  return button;
}));
$("search").oninput = () => { filter.words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean); chosen = null; describe(); draw(); };
$("casts").onchange = () => { filter.casts = $("casts").value; draw(); };
$("sort").onclick = () => {
  filter.sorted = !filter.sorted;
  $("sort").setAttribute("aria-pressed", String(filter.sorted));
  draw();
};
$("open").onclick = () => { blocks.forEach((b) => { b.open = true; }); draw(); };
$("close").onclick = () => { blocks.forEach((b) => { b.open = false; }); draw(); };
onresize = mark;  // a narrow window's gutter is narrow
document.onkeydown = (event) => {
  if (event.key === "Escape") { chosen = null; describe(); mark(); }
  if (["INPUT", "SELECT", "BUTTON"].includes(event.target.tagName)) return;
  const at = rows.indexOf(chosen), block = chosen?.kind === "block" && at >= 0;
  if (block && (event.key === "Enter" || (event.key === "ArrowRight") !== chosen.open && /Right|Left/.test(event.key))) {
    event.preventDefault();
    chosen.open = !chosen.open;
    draw();
    return $("rows").children[at].focus();
  }
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: rows.length - 1 }[event.key], next = rows[to];
  if (!next || next.kind === "end") return;
  event.preventDefault();
  choose(next);
  $("rows").children[to].focus();
  $("rows").children[to].scrollIntoView({ block: "nearest" });
};
