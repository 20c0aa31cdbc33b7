"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const make = (tag, cls, text) => {
  const e = document.createElement(tag);
  if (cls) e.className = cls;
  if (text !== undefined) e.textContent = text;
  return e;
};
const COLOURS = { bf16: "--bf16", f16: "--f16", f32: "--f32", f64: "--f64" };
const colour = (dtype) => `var(${COLOURS[dtype.split(">").pop()] || "--other"})`;
const bytes = (n) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let u = 0;
  while (n >= 1024 && u < 4) { n /= 1024; u++; }
  return `${u ? n.toFixed(1) : n} ${units[u]}`;
};
const width = (n) => Math.max(2, Math.min(60, 3 * Math.log2(1 + n / 256)));
const GONE = ["hoisted", "shared", "folded", "fused"];
const gone = (node) => node.kind === "cast" && node.fate.some((word) => GONE.includes(word));

let nodes, rows, blocks, users, selected = -1;
const off = new Set();

function show(index) {
  const graph = data.graphs[index];
  nodes = graph.nodes;
  rows = []; blocks = []; selected = -1; off.clear();
  users = nodes.map(() => []);
  nodes.forEach((node, i) => node.inputs.forEach((j) => users[j].push(i)));
  $("rows").replaceChildren();
  build();
  chips();
  overview(graph);
  if (nodes.length > 300) blocks.filter((b) => b.depth > 1).forEach((b) => close(b, true));
  apply();
}

// Consecutive values of one module stand in one block, as deep as its path.
function build() {
  const stack = [{ key: "", body: $("rows"), depth: 0 }];
  nodes.forEach((node, i) => {
    const path = node.kind === "input" ? ["graph inputs"] : node.module ? node.module.split(".") : [];
    let depth = 0;
    while (depth < path.length && depth + 1 < stack.length && stack[depth + 1].key === path[depth]) depth++;
    stack.length = depth + 1;
    for (; depth < path.length; depth++) stack.push(block(stack[depth], path[depth]));
    const row = rowOf(node, i);
    stack[stack.length - 1].body.append(row);
    rows.push(row);
    stack.slice(1).forEach((b) => b.members.push(i));
  });
  for (const b of blocks) {
    const casts = b.members.filter((i) => nodes[i].kind === "cast");
    const size = casts.reduce((sum, i) => sum + nodes[i].bytes, 0);
    b.head.append(make("span", "sum", `${b.members.length} values` + (casts.length ? `, ${casts.length} casts, ${bytes(size)}` : "")));
  }
}

function block(parent, key) {
  const element = make("div", "block"), head = make("div", "head"), body = make("div", "body");
  head.append(make("span", "", key));
  element.append(head, body);
  parent.body.append(element);
  const b = { key, element, head, body, depth: parent.depth + 1, members: [] };
  head.onclick = () => { close(b); arcs(); };
  blocks.push(b);
  return b;
}

const close = (b, closed) => b.element.classList.toggle("closed", closed);

function rowOf(node, i) {
  const row = make("div", `row ${node.kind}${gone(node) ? " gone" : ""}`);
  row.dataset.name = node.name;
  if (node.dtype) {
    const chip = make("span", "dtype", node.dtype);
    chip.style.background = colour(node.dtype);
    row.append(chip);
  }
  if (node.kind === "cast") {
    const bar = make("span", "bar");
    bar.style.width = `${width(node.bytes)}px`;
    row.append(bar);
  }
  row.append(make("span", "name", node.kind === "cast" ? `cast of ${node.of} for ${node.op}` : node.kind === "op" ? node.op : node.name));
  if (node.shape.length) row.append(make("span", "shape", node.shape.join("\u00d7")));
  if (node.kind === "cast") row.append(make("span", "size", `${bytes(node.bytes)} ${node.fate.slice(1).join(" ")}`));
  row.onclick = () => select(i);
  return row;
}

function chips() {
  const found = [...new Set(nodes.filter((n) => n.kind !== "cast" && n.dtype).map((n) => n.dtype))].sort();
  $("dtypes").replaceChildren(...found.map((dtype) => {
    const chip = make("button", "", dtype);
    chip.style.background = colour(dtype);
    chip.setAttribute("aria-pressed", "true");
    chip.onclick = () => { off.has(dtype) ? off.delete(dtype) : off.add(dtype); press(chip, !off.has(dtype)); apply(); };
    return chip;
  }));
}

const press = (button, on) => button.setAttribute("aria-pressed", String(on));
const pressed = (button) => button.getAttribute("aria-pressed") === "true";

function apply() {
  const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const casts = pressed($("casts-only"));
  let count = 0;
  nodes.forEach((node, i) => {
    const text = [node.name, node.op, node.module, node.source, node.because, node.dtype].join(" ").toLowerCase();
    const on = words.every((w) => text.includes(w)) && (!casts || node.kind === "cast") &&
      !(node.kind === "cast" ? node.dtype.split(">") : [node.dtype]).some((d) => off.has(d));
    rows[i].classList.toggle("hidden", !on);
    count += on;
  });
  for (const b of blocks) {
    const any = b.members.some((i) => !rows[i].classList.contains("hidden"));
    b.element.classList.toggle("hidden", !any);
    if (any && words.length) close(b, false);
  }
  $("count").textContent = `${count} of ${nodes.length} values`;
  arcs();
}

// Where a value stands: its row, or the head of the closed block it is in.
function place(i, top) {
  const row = rows[i];
  if (row.classList.contains("hidden")) return null;
  let at = row;
  for (let e = row.parentElement; e && e.id !== "rows"; e = e.parentElement) if (e.classList.contains("closed")) at = e.firstElementChild;
  const box = at.getBoundingClientRect();
  return box.height ? box.top - top + box.height / 2 : null;
}

function arcs() {
  const svg = $("edges"), top = svg.getBoundingClientRect().top;
  const paths = [];
  const edge = (from, to, style) => {
    const a = nodes[from].kind === "input" && selected !== to ? null : place(from, top), b = place(to, top);
    if (b === null || a === b) return;
    const y = a === null ? b - 8 : a, bend = Math.min(88, 12 + Math.abs(b - y) / 6);
    paths.push(`<path d="M92 ${y} C${92 - bend} ${y} ${92 - bend} ${b} 92 ${b}" fill="none" ${style}/>`);
  };
  nodes.forEach((node, i) => {
    if (node.kind !== "cast" || rows[i].classList.contains("hidden")) return;
    const style = `stroke="${colour(node.dtype)}" stroke-width="${(width(node.bytes) / 8).toFixed(1)}" class="cast-edge"` +
      (gone(node) ? ' stroke-dasharray="3 3" opacity="0.5"' : "");
    node.inputs.slice(0, 1).forEach((j) => edge(j, i, style));
    users[i].forEach((k) => edge(i, k, style));
  });
  if (selected >= 0) {
    nodes[selected].inputs.forEach((j) => edge(j, selected, 'stroke="#0f172a"'));
    users[selected].forEach((k) => edge(selected, k, 'stroke="#0f172a"'));
  }
  svg.innerHTML = paths.join("");
}

function select(i, reveal) {
  selected = i;
  rows.forEach((row) => row.classList.remove("selected", "near"));
  [...nodes[i].inputs, ...users[i]].forEach((j) => rows[j].classList.add("near"));
  rows[i].classList.add("selected");
  if (reveal) {
    blocks.filter((b) => b.members.includes(i)).forEach((b) => close(b, false));
    rows[i].scrollIntoView({ block: "center" });
  }
  describe(nodes[i], i);
  arcs();
}

function describe(node, i) {
  const list = make("dl");
  const add = (term, ...values) => {
    const dd = make("dd");
    dd.append(...values);
    list.append(make("dt", "", term), dd);
  };
  const links = (indices) => indices.flatMap((j) => {
    const a = make("a", "", nodes[j].kind === "op" ? `${nodes[j].op} (${nodes[j].name})` : nodes[j].name);
    a.onclick = () => select(j, true);
    return [a, make("br")];
  });
  if (node.because) add("why", node.because);
  if (node.source) add("line", node.source);
  if (node.module) add("module", node.module);
  if (node.dtype) add(node.kind === "cast" ? "dtypes" : "dtype", node.dtype);
  if (node.shape.length) add("shape", node.shape.join(" \u00d7 "));
  if (node.kind === "cast") { add("bytes", bytes(node.bytes)); add("fate", node.fate.join(", ")); }
  if (node.inputs.length) add("reads", ...links(node.inputs));
  if (users[i].length) add("read by", ...links(users[i]));
  $("details").replaceChildren(make("h2", "", node.kind === "cast" ? `cast for ${node.op}` : node.kind === "op" ? node.op : node.name), list);
}

function overview(graph) {
  const table = make("table"), head = make("tr");
  ["conversions in one call", "times", "bytes"].forEach((text) => head.append(make("th", "", text)));
  table.append(head, ...data.totals.map((total) => {
    const row = make("tr");
    [total.stage, total.casts, bytes(total.bytes)].forEach((text) => row.append(make("td", "", text)));
    return row;
  }));
  const parts = [make("h2", "", graph.precision), table, make("p", "", "Click a row for its reason and its line. Bars and curves are casts, wide for many bytes, dashed where they run no more in every call.")];
  if (graph.reason) parts.push(make("p", "", `The graph ends here: ${graph.reason}`));
  if (data.unknown.length) parts.push(make("p", "", `Unknown to the policy: ${data.unknown.join(", ")}`));
  $("details").replaceChildren(...parts);
}

data.graphs.forEach((graph, i) => {
  const option = make("option", "", `graph ${i}: ${graph.precision}, ${graph.nodes.filter((n) => n.kind === "op").length} ops`);
  option.value = i;
  $("graph").append(option);
});
$("graph").onchange = () => show(Number($("graph").value));
$("search").oninput = apply;
$("casts-only").onclick = () => { press($("casts-only"), !pressed($("casts-only"))); apply(); };
$("open-all").onclick = () => { blocks.forEach((b) => close(b, false)); arcs(); };
$("close-all").onclick = () => { blocks.forEach((b) => close(b, true)); arcs(); };
window.addEventListener("resize", arcs);
if (data.graphs.length) show(0);
