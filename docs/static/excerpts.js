// Sphinx looks in a page for the stems of the words that were asked for ("memori"), and shows the page's head where the
// text has none of them. Here a stem loses letters until the text has it.
if (typeof Search !== "undefined") {
  const summarize = Search.makeSearchSummary;
  Search.makeSearchSummary = (html, stems, anchor) => {
    const text = Search.htmlToText(html, anchor).toLowerCase();
    const present = [...stems].map((stem) => {
      let part = stem;
      while (part.length > 3 && !text.includes(part)) part = part.slice(0, -1);
      return part;
    });
    return summarize(html, new Set(present), anchor);
  };
}
