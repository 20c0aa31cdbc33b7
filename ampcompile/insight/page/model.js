// The data as a tree of blocks and ops, and what a search leaves of it. Nothing here touches the page.

const casts = [...data.graphs.flatMap((graph) => graph.casts), ...data.results]
  .map((cast, id) => ({ ...cast, kind: "cast", id, from: cast.dtype_from, to: cast.dtype_to, readers: [] }));
const running = (cast) => !["hoisted", "shared", "folded", "fused", "quantized"].some((fate) => cast.fate.includes(fate));
const size = (list) => list.reduce((sum, cast) => sum + cast.bytes, 0);
const units = ["B", "KiB", "MiB", "GiB", "TiB"];
const human = (n, unit = 0) => (n < 1024 || unit === 4 ? `${unit ? n.toFixed(1) : n} ${units[unit]}` : human(n / 1024, unit + 1));
const inBackward = data.graphs.flatMap((graph) => graph.backward_casts).map((cast) => ({ ...cast,
  text: ["backward", cast.of, cast.module, cast.source, data.lines[cast.source] || "", cast.dtype_from, cast.dtype_to].join(" ").toLowerCase() }));

const ops = [];
const root = { kind: "block", key: "", path: "", items: [], ops: [], depth: -1, open: true };
const blocks = [];

let counted = 0;  // casts of the graphs before

data.graphs.forEach((graph, number) => {
  const own = new Map(casts.slice(counted, counted += graph.casts.length).map((cast) => [cast.name, cast]));
  const rows = new Map(graph.values.map((value, i) => [value.name, ops.length + i]));
  const several = data.graphs.length > 1;
  const top = several ? block(root, `graph ${number}`, `${number}`) : root;
  top.note = graph.precision;
  const stack = [top];
  // What an op reads: the value behind casts, and the casts.
  const read = (name) => {
    const through = [];
    for (; own.has(name); [name] = own.get(name).reads) through.push(own.get(name));
    return { from: ops[rows.get(name)] || null, name, casts: through };
  };
  graph.values.forEach((value) => {
    const op = { ...value, op: value.op === "output" ? "returned" : value.op, dtype: value.dtype || "", kind: "op", id: ops.length, users: [] };
    op.reads = value.reads.map(read);
    op.reads.forEach((read) => { if (read.from) read.from.users.push(op); read.casts.forEach((cast) => cast.readers.push(op)); });
    op.casts = unique(op.reads.flatMap((read) => read.casts));
    op.text = [op.op, op.name, op.module, op.source, data.lines[op.source] || "", op.because, op.dtype,
      ...op.casts.flatMap((cast) => [cast.because, cast.of, cast.from, cast.to, ...cast.fate])].join(" ").toLowerCase();
    ops.push(op);
    // Consecutive ops of one module stand in one block, as deep as its path.
    const path = op.module ? op.module.split(".") : [];
    let depth = 0;
    while (depth < path.length && depth + 1 < stack.length && stack[depth + 1].key === path[depth]) depth++;
    stack.length = depth + 1;
    for (; depth < path.length; depth++) stack.push(block(stack[depth], path[depth], path.slice(0, depth + 1).join(".")));
    stack[stack.length - 1].items.push(op);
    stack.forEach((b) => b.ops.push(op));
    if (several) root.ops.push(op);
  });
  if (graph.reason) root.items.push({ kind: "end", text: `graph break: ${graph.reason}` });
});
simplify(root);
blocks.forEach((b) => { b.open = root.items.length === 1 && b.depth === 0; });  // folded, but for what holds everything

function block(parent, key, path) {
  const made = { kind: "block", key, path, items: [], ops: [], open: true };
  parent.items.push(made);
  return made;
}

// A module with one op is that op; a module that holds one other is written `a.b`.
function simplify(parent) {
  parent.items = parent.items.map((item) => {
    while (item.kind === "block" && item.items.length === 1 && !item.note) {
      const [only] = item.items;
      if (only.kind === "op") return Object.assign(only, { label: item.key, depth: parent.depth + 1 });
      if (only.kind !== "block") break;
      item = Object.assign(only, { key: `${item.key}.${only.key}` });
    }
    item.depth = parent.depth + 1;
    if (item.kind === "block") { blocks.push(item); simplify(item); }
    return item;
  });
}

const filter = { words: [], casts: "", sorted: false, dtype: "" };
const searching = () => filter.words.length > 0 || filter.dtype !== "";

function matches(op) {
  if (filter.dtype && op.dtype !== filter.dtype) return false;
  if (filter.casts === "any" && !op.casts.length) return false;
  if (filter.casts === "running" && !op.casts.some(running)) return false;
  return filter.words.every((word) => op.text.includes(word));
}

// What stands below one another; a search opens every block it finds something in.
function visible() {
  const found = new Set(ops.filter(matches));
  const rows = [];
  const visit = (item) => {
    if (item.kind === "op" ? !found.has(item) : item.kind === "end" ? searching() : !item.ops.some((op) => found.has(op))) return;
    rows.push(item);
    if (item.kind === "block" && (item.open || searching())) item.items.forEach(visit);
  };
  if (filter.sorted) rows.push(...[...found].sort((a, b) => size(b.casts) - size(a.casts)));
  else root.items.forEach(visit);
  return { rows, found };
}

// Edges between rows: those into and out of a closed block are one. Casts of graph inputs come from nowhere.
function edges(rows, found) {
  const at = new Map();
  rows.forEach((row, i) => (row.kind === "op" ? [row] : row.ops || []).forEach((op) => { if (found.has(op)) at.set(op, i); }));
  const drawn = new Map();
  at.forEach((to, op) => op.reads.forEach((read) => {
    const from = read.from ? at.get(read.from) ?? null : null;
    if (from === to || (from === null && !read.casts.length)) return;
    const key = `${from}>${to}`;
    if (!drawn.has(key)) drawn.set(key, { kind: "edge", from, to, casts: new Set(), ends: [] });
    read.casts.forEach((cast) => drawn.get(key).casts.add(cast));
    drawn.get(key).ends.push(read.from, op);
  }));
  return [...drawn.values()].map((edge) => ({ ...edge, casts: [...edge.casts] }));
}
