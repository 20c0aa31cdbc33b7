// node search.js SITE QUERY ...   prints, for each query, the pages that the site's search finds, best first, as JSON.
const fs = require("fs");
const vm = require("vm");
const [site, ...queries] = process.argv.slice(2);
const page = { getElementById: () => null, addEventListener: () => {}, documentElement: { dataset: {} } };
const context = vm.createContext({ document: page, localStorage: { setItem: () => {} }, _ready: () => {}, SPHINX_HIGHLIGHT_ENABLED: false });
vm.runInContext("var window = globalThis", context);
const files = ["_static/documentation_options.js", "_static/searchtools.js", "_static/language_data.js", "searchindex.js"];
for (const file of files) vm.runInContext(fs.readFileSync(`${site}/${file}`, "utf8"), context);
const ranked = (query) => `Search._performSearch(...Search._parseQuery(${JSON.stringify(query)})).map((found) => found[0]).reverse()`;
console.log(vm.runInContext(`JSON.stringify([${queries.map(ranked).join(", ")}])`, context));
