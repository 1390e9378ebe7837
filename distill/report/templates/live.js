{# Written without the characters that XML would have escaped, so that a page can be read by any parser. A page that is
   open twice shares its memory, which does no harm. `since` is when something new was seen last: by the clock of the
   reader once a change was seen, because the host that writes may have another one; before that by the page's own time. #}
(function () {
  var every = {{ (1000 * renewal.seconds)|round|int }}, written = {{ renewal.written }}, limit = {{ (3000 * renewal.seconds + 30000)|round|int if renewal.watched else 0 }}, began = Date.now();
  var key = "distill " + location.pathname, state = {};
  try { state = JSON.parse(sessionStorage.getItem(key)) || {}; } catch (error) { }
  if (state.written !== written) {
    state.changed = state.written > 0;
    state.seen = began;
    state.written = written;
  }
  var since = state.changed ? state.seen : Math.min(state.seen, written);
  function folded() { return [].slice.call(document.querySelectorAll("details")); }
  function title(each) { return each.querySelector("summary").textContent; }
  function keep() {
    state.x = scrollX;
    state.y = scrollY;
    state.open = {};
    folded().forEach(function (each) { state.open[title(each)] = each.open; });
    try { sessionStorage.setItem(key, JSON.stringify(state)); } catch (error) { }
  }
  function restore() {
    folded().forEach(function (each) {
      if (state.open) { if (title(each) in state.open) { each.open = state.open[title(each)]; } }
    });
    if (state.y > 0) { scrollTo(state.x || 0, state.y); }
    look();
  }
  function look() {
    var now = Date.now(), notice = document.getElementById("overdue");
    if (limit > 0) { if (now - since > limit) { if (notice) { if (notice.hidden) {
      notice.textContent = "No news since " + new Date(since).toLocaleString() + ": the run may have been killed, or its machine " +
        "lost. If so, the same command resumes it.";
      notice.hidden = false;
    } } } }
    if (now - began >= every) {
      if (!document.hidden) { if (String(getSelection()) === "") { keep(); location.reload(); } }
    }
  }
  document.addEventListener("DOMContentLoaded", restore);
  window.addEventListener("pagehide", keep);
  setInterval(look, 1000);
})();
