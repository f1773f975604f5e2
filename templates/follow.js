"use strict";
(() => {
  /* A page that is renewed: it loads itself again, but not under the hands of somebody who filters, selects or reads a picture. */
  const kept = JSON.parse(document.getElementById("data").textContent).follow;
  if (!kept) return;
  const busy = () =>
    document.activeElement?.matches("input, select, [data-plot]") ||
    [...document.querySelectorAll("input[type=search]")].some((one) => one.value) ||
    String(getSelection());
  const again = () => (busy() ? setTimeout(again, 2000) : location.reload());
  setTimeout(again, kept.every * 1000);
  const tell = () => {
    const late = Date.now() / 1000 - kept.made;
    document.getElementById("stale").hidden = late < 3 * kept.every + 30;
  };
  setInterval(tell, 1000);
  tell();
})();
