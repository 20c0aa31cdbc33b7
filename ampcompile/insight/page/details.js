// The panel beside the graph: what was clicked, or the whole report.

function describe() {
  const parts = { op: ofOp, cast: ofCast, block: ofBlock, edge: ofEdge }[chosen?.kind] || ofReport;
  fillDetails(parts(chosen));
}

function source(place) {
  const code = data.lines[place];
  return code ? make("span", "", place, make("pre", "", code)) : place;
}

const fileOf = (place) => place.replace(/.*[/\\]/, "");  // a list cuts long lines off at their end

function link(item, ...children) {
  const line = make("div", "line link", ...children);
  line.onclick = () => choose(item, true);
  return line;
}

const opLink = (op) => link(op, chip(op.dtype), ` ${op.label || plain(op.op)} `, make("span", "dim", op.name));
const castLink = (cast) => link(cast, chip(cast.from), " \u2192 ", chip(cast.to), ` ${cast.of} ${human(cast.bytes)} `,
  make("span", "dim", `${cast.fate.slice(1).join(", ")} ${plain(cast.op)} ${cast.module}`));
const largest = (list, most = 12) => [...list].sort((a, b) => running(b) - running(a) || b.bytes - a.bytes).slice(0, most);

function ofOp(op) {
  return [make("h2", "", plain(op.op)),
    list(["dtype", op.dtype && chip(op.dtype)], ["why", op.because], ["line", op.source && source(op.source)], ["module", op.module],
      ["shape", shape(op.shape)], ["value", op.name],
      ["reads", ...op.reads.map((read) => (read.from ? opLink(read.from) : make("div", "line", read.name)))],
      ["read by", ...unique(op.users).map(opLink)]),
    ...(op.casts.length ? [make("h3", "", "casts of what it reads"), ...op.casts.map(castLink)] : [])];
}

function ofCast(cast) {
  const [reader] = cast.readers;
  return [make("h2", "", `cast of ${cast.of} for ${plain(cast.op)}`),
    list(["dtypes", chip(cast.from), " \u2192 ", chip(cast.to)], ["why", cast.because], ["fate", cast.fate.join(", ")],
      ["bytes", human(cast.bytes)], ["shape", shape(cast.shape)], ["line", cast.source && source(cast.source)], ["module", cast.module],
      ["value", reader ? reader.reads.find((read) => read.casts.includes(cast)).name : ""], ["read by", ...unique(cast.readers).map(opLink)])];
}

function ofBlock(b) {
  const inside = unique(b.ops.flatMap((op) => op.casts));
  const dtypes = unique(b.ops.map((op) => op.dtype)).sort();
  return [make("h2", "", b.path), ...dtypes.map((dtype) => make("div", "line", chip(dtype), ` ${b.ops.filter((op) => op.dtype === dtype).length} ops`)),
    make("h3", "", `${inside.length} casts, ${human(size(inside))}`), ...largest(inside, 40).map(castLink)];
}

function ofEdge(edge) {
  return [make("h2", "", `${edge.casts.length} casts on one edge, ${human(size(edge.casts))}`), ...largest(edge.casts, 40).map(castLink)];
}

// What backward keeps, by module and by value; equal layers are folded.
function ofKept() {
  const row = (kept, name, more) => make("div", "line", ...(kept.dtype ? [chip(kept.dtype), " "] : []), `${human(kept.bytes)} ${name} `,
    make("span", "dim", `${kept.times > 1 ? `x ${kept.times} ` : ""}${more}`));
  const { backward, results, freed, alive } = data.saved_totals, { modules, values } = data.kept;
  if (!backward) return [];
  return [make("h3", "", `kept for backward: ${human(backward)}`),
    make("p", "dim", [`alive anyway, weights, copies and arguments: ${human(alive)}`,
      results && `results that only the caller holds: ${human(results)}`,
      freed && `of these, a loss in the compiled function frees ${human(freed)}`].filter(Boolean).join("; ")),
    ...modules.slice(0, 24).map((kept) => row(kept, kept.module || "(none)", "")),
    make("h3", "", "the largest values kept"),
    ...values.slice(0, 24).map((kept) => row(kept, plain(kept.op), `${shape(kept.shape)} ${kept.module} ${kept.because} ${fileOf(kept.source)}`))];
}

function ofReport() {
  const most = Math.max(1, ...data.balance.map((total) => total.bytes));
  const table = make("table", "", make("tr", "", ...["casts", "times", "bytes"].map((head) => make("th", "", head))),
    ...data.balance.map((total) => {
      const meter = make("div", "meter");
      meter.style.width = `${(100 * total.bytes) / most}%`;
      return make("tr", "", make("td", "", total.stage, meter), make("td", "", String(total.casts)), make("td", "", human(total.bytes)));
    }));
  const matching = inBackward.filter((cast) => filter.words.every((word) => cast.text.includes(word)));
  const backward = matching.sort((a, b) => b.bytes - a.bytes).slice(0, 12).map((cast) => make("div", "line",
    chip(cast.dtype_from), " \u2192 ", chip(cast.dtype_to), ` ${human(cast.bytes)} ${plain(cast.of)} `,
    make("span", "dim", `${shape(cast.shape)} ${cast.module} ${fileOf(cast.source)}`)));
  const which = filter.words.length ? "that match" : "in all";
  const listed = backward.length ? [make("h3", "", `casts in backward, largest first; ${which}: ${matching.length}`), ...backward] : [];
  if (filter.words.length && listed.length) return listed;
  return [make("h2", "", unique(data.graphs.map((graph) => graph.precision)).join("; ") || "no graph"),
    make("p", "dim", data.about), make("p", "", `${data.gain}.`), ...data.notes.map((note) => make("p", "", `${note}.`)), table,
    make("h3", "", "legend"), ofLegend(), ...ofKept(),
    ...listed,
    ...(data.unknown_ops.length ? [make("h3", "", "unknown to the policy"), make("p", "", data.unknown_ops.join(", "))] : []),
    ...(casts.some(running) ? [make("h3", "", "largest casts in every call"), ...largest(casts.filter(running)).map(castLink)] : [])];
}

function ofLegend() {
  const drawing = (paths) => { const svg = make("span"); svg.innerHTML = `<svg viewBox="0 0 60 18">${paths}</svg>`; return svg; };
  const line = (cls) => `<path class="${cls}" d="M0 9H60"/>`, diamond = '<path class="mark" d="M30 4l5 5l-5 5l-5 -5z"/>';
  const border = (cls) => {
    const element = make("span", `tag ${cls}`, "weight 6 KiB");
    element.style.setProperty("--from", colour("f32"));
    element.style.setProperty("--to", colour("bf16"));
    return element;
  };
  const rows = [...unique(ops.map((op) => op.dtype)).filter(Boolean).sort().map((dtype) => [make("span", "", chip(dtype)), `computed in ${NAMES[dtype] || dtype}`]),
    [border(""), "a cast of what the op reads: kind and bytes; the border goes from the colour of one type to that of the other"],
    [border("idle"), "dashed: a cast that doesn't run in every call, as those of weights, once per update"],
    [drawing(line("edge")), "a curve: a value that is read further down"],
    [drawing(line("") + diamond), "with a diamond: it is cast on the way, the thicker the more bytes"],
    [drawing(line("idle") + diamond), "dashed: that cast doesn't run in every call"]];
  return make("div", "", make("div", "legend", ...rows.flatMap(([sign, words]) => [sign, make("span", "", words)])),
    make("p", "dim", "Click a row, a cast or a diamond for its reason and its line; arrow keys move on, and open and close."));
}

draw();
describe();
chooseLinked();
