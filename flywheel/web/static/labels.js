// Keys of the task page: a, r and u label the reply, c goes to the comment (Escape leaves it), j and k go to the next
// and the previous task. What a key does is the element with this `data-key`. Keys can be turned off, because some
// programs type single letters for other reasons.
"use strict";
(() => {
  const STORED = "flywheel-keys";
  const choice = document.getElementById("keys");
  let isOn = true;
  try {
    isOn = localStorage.getItem(STORED) !== "off";
  } catch {
    // Storage is blocked: the choice lasts as long as the page.
  }

  function show() {
    for (const each of document.querySelectorAll("kbd")) each.hidden = !isOn;
  }

  if (choice) {
    choice.closest(".keys-choice").hidden = false;
    choice.checked = isOn;
    choice.addEventListener("change", () => {
      isOn = choice.checked;
      try {
        localStorage.setItem(STORED, isOn ? "on" : "off");
      } catch {
        // As above.
      }
      show();
    });
  }
  show();

  let isSent = false;
  document.addEventListener("submit", (event) => {
    // A label is sent once, however often the key is pressed.
    if (isSent) event.preventDefault();
    else if (event.target.closest(".labelling")) isSent = true;
  });
  addEventListener("pageshow", () => (isSent = false));

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
    const where = event.target;
    if (where.closest("textarea, select, input:not([type=checkbox]), [contenteditable]")) {
      if (event.key === "Escape") where.blur();
      return;
    }
    if (!isOn || event.repeat || !/^[a-z]$/.test(event.key)) return;
    const found = document.querySelector(`[data-key="${event.key}"]`);
    if (!found) return;
    event.preventDefault();
    if (found.matches("textarea")) found.focus();
    else found.click();
  });
})();
