/* Draws the charts of a report and ties them together: one cursor, one zoom, runs on and off. */
"use strict";
const figures = JSON.parse(document.getElementById("figures").textContent);
const touch = window.matchMedia("(pointer: coarse)").matches;
const options = { responsive: true, displayModeBar: false, displaylogo: false, doubleClick: "reset" };
const charts = figures.map((figure) => {
  const chart = document.getElementById(figure.id);
  figure.layout.dragmode = touch ? false : "zoom"; // a finger scrolls the page
  Plotly.newPlot(chart, figure.data, figure.layout, options);
  return chart;
});
const lines = charts.filter((chart) => chart.classList.contains("plot"));

let leading = null; // the chart under the cursor; the others follow it
for (const chart of charts) {
  chart.on("plotly_relayout", (change) => {
    const range = change["xaxis.range"] ?? [change["xaxis.range[0]"], change["xaxis.range[1]"]];
    if (leading || range[0] === undefined) return;
    leading = chart;
    const all = charts.map((other) => Plotly.relayout(other, { "xaxis.range": [...range] }));
    Promise.all(all).finally(() => { leading = null; });
  });
}
for (const chart of lines) {
  chart.on("plotly_hover", (event) => {
    if (leading) return;
    leading = chart;
    for (const other of lines) {
      if (other !== chart) Plotly.Fx.hover(other, { xval: event.points[0].x }, "xy");
    }
    leading = null;
  });
  chart.on("plotly_unhover", () => {
    if (leading) return;
    leading = chart;
    for (const other of lines) if (other !== chart) Plotly.Fx.unhover(other);
    leading = null;
  });
}

for (const button of document.querySelectorAll(".legend button")) {
  button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") === "false";
    button.setAttribute("aria-pressed", String(shown));
    for (const chart of lines) {
      const own = chart.data.flatMap((trace, i) => (trace.run === button.dataset.run ? [i] : []));
      if (own.length) Plotly.restyle(chart, { visible: shown }, own);
      (chart.layout.annotations ?? []).forEach((word, i) => {
        if (word.name === button.dataset.run) {
          Plotly.relayout(chart, { [`annotations[${i}].visible`]: shown });
        }
      });
    }
  });
}
