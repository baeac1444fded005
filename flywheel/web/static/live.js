// Keeps the elements that are marked `data-live`, each with an id, up to date while the page is open.
//
// The page is fetched again every few seconds, and what differs in these elements is replaced. Elements in them that
// are marked `data-keep` belong to other scripts and stay as they are. A form that is being used stays as it is until
// it is left. After each update the document gets the event `live:updated`.
"use strict";
(() => {
  const POLL_MS = 2000;
  const REST = 4; // how many times as long as an update took the next one waits, so that slow pages cost little
  const LONGEST_REST_MS = 10000;
  const FORM_MS = 1000; // until a form that was in use is looked at again
  const IN_USE = "form:focus-within, form:hover";
  let polling = 0, isFetching = false, isStale = false, later = 0;

  const marked = () => document.querySelectorAll("[data-live][id]");

  function open() {
    close();
    if (document.hidden || !marked().length) return;
    polling = setInterval(refresh, POLL_MS);
    refresh();
  }

  const close = () => clearInterval(polling);

  async function refresh() {
    isStale = true;
    if (isFetching) return;
    isFetching = true;
    try {
      while (isStale && !document.hidden) {
        isStale = false;
        const begin = performance.now();
        await update();
        const rest = Math.min(LONGEST_REST_MS, REST * (performance.now() - begin));
        await new Promise((done) => setTimeout(done, rest));
      }
    } catch {
      // The server is gone or restarts: the next poll tries again.
    } finally {
      isFetching = false;
    }
  }

  async function update() {
    const address = location.href;
    const answer = await fetch(address, { headers: { Accept: "text/html" }, credentials: "same-origin" });
    if (answer.redirected) return location.reload(); // to the sign-in, or the page has moved
    if (!answer.ok) return;
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    if (location.href !== address) return;
    let waits = false;
    for (const old of marked()) {
      const found = fresh.getElementById(old.id);
      if (!found && old.dataset.live === "until-replaced") return location.reload(); // another page is there now
      if (!found) continue;
      if (old.querySelector(IN_USE)) waits = true;
      else {
        align(old, found);
        if (window.htmx) window.htmx.process(old);
      }
    }
    if (waits) whenFree();
    document.dispatchEvent(new CustomEvent("live:updated", { detail: fresh }));
  }

  function whenFree() {
    clearTimeout(later);
    const isInUse = () => [...marked()].some((each) => each.querySelector(IN_USE));
    later = setTimeout(() => (isInUse() ? whenFree() : refresh()), FORM_MS);
  }

  // Make `old` like `found`, and leave what is the same: focus, selection, scrolling and opened details stay.
  function align(old, found) {
    if (old.nodeType !== Node.ELEMENT_NODE) return;
    if (old.hasAttribute("data-keep") || old.isEqualNode(found)) return;
    for (const { name } of [...old.attributes]) if (!found.hasAttribute(name) && name !== "open") old.removeAttribute(name);
    for (const { name, value } of [...found.attributes]) if (old.getAttribute(name) !== value && name !== "open") old.setAttribute(name, value);
    const wanted = [...found.childNodes];
    wanted.forEach((each, place) => {
      const at = old.childNodes[place];
      if (!at) old.append(document.importNode(each, true));
      else if (isAlike(at, each)) align(at, each);
      else if (each.nodeType === Node.ELEMENT_NODE && each.id && hasChild(old, each.id)) {
        // It has moved up, because what was before it is gone.
        const own = hasChild(old, each.id);
        old.insertBefore(own, at);
        align(own, each);
      } else if (at.nodeType === Node.ELEMENT_NODE && at.id && wanted.some((one) => one.id === at.id)) {
        // Something new is before it.
        old.insertBefore(document.importNode(each, true), at);
      } else at.replaceWith(document.importNode(each, true));
    });
    while (old.childNodes.length > wanted.length) old.lastChild.remove();
  }

  const hasChild = (parent, id) => [...parent.children].find((each) => each.id === id);

  function isAlike(one, other) {
    if (one.nodeType !== other.nodeType) return false;
    if (one.nodeType !== Node.ELEMENT_NODE) {
      if (one.data !== other.data) one.data = other.data;
      return true;
    }
    return one.tagName === other.tagName && one.id === other.id;
  }

  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  addEventListener("pagehide", close);
  addEventListener("pageshow", open);
  // htmx has exchanged a part of the page, and perhaps its address.
  document.addEventListener("htmx:after:history:update", open);
})();
