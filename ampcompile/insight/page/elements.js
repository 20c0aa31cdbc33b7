"use strict";
// What all pages share: their data, and elements made of it. Text becomes text nodes, never markup.

const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const unique = (list) => [...new Set(list)];
const NAMES = { bf16: "bfloat16", f16: "float16", f32: "float32", f64: "float64" };
const colour = (dtype) => `var(--${["bf16", "f16", "f32", "f64"].includes(dtype) ? dtype : "other"})`;
const plain = (name) => name.replace(/^aten\./, "");
const shape = (sizes) => sizes.join("\u00d7");

function make(tag, cls, ...children) {
  const element = document.createElement(tag);
  if (cls) element.className = cls;
  element.append(...children.filter((child) => child !== null && child !== ""));
  return element;
}

function chip(dtype, tag = "span") {
  const element = make(tag, "chip", dtype || "\u2013");
  element.style.setProperty("--c", colour(dtype));
  return element;
}

function list(...entries) {
  return make("dl", "", ...entries.filter(([, value]) => value && value.length !== 0)
    .flatMap(([term, ...values]) => [make("dt", "", term), make("dd", "", ...values)]));
}

function fillDetails(parts) {
  const copy = make("button", "copy", "copy");
  $("details").replaceChildren(copy, ...parts);
  copy.onclick = () => navigator.clipboard.writeText($("details").innerText.replace(/^copy\s*/, "")).then(() => { copy.textContent = "copied"; });
  copy.hidden = !navigator.clipboard;  // a notebook from another machine, without encryption, may not copy
  $("details").scrollTop = 0;
}

// The address names the row, so that it can be sent to somebody; a page in a notebook has none of its own.
function rememberAddress(anchor) {
  if (anchor && location.protocol !== "about:") history.replaceState(null, "", anchor);
}

// Colours are the system's, light or dark; in the frame of a notebook those of what is behind the frame.
function matchNotebook() {
  let behind = frameElement;  // null in a window of its own
  const background = () => getComputedStyle(behind).backgroundColor.match(/[\d.]+/g).map(Number);
  while (behind && background()[3] === 0) behind = behind.parentElement;
  if (!behind) return;
  const [red, green, blue] = background();
  document.documentElement.style.colorScheme = red + green + blue < 3 * 128 ? "dark" : "light";
}

matchNotebook();
