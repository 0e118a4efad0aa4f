// Says when the page is written next, loads it then, and says if it has not been written for too long.
{
  const current = document.getElementById("current"), stale = document.getElementById("stale");
  const next = document.getElementById("next"), { written, due, timeout } = stale.dataset;
  const loaded = Date.now();
  function check() {
    const age = (Date.now() - Date.parse(written)) / 1000, left = Number(due) - age;
    stale.hidden = !(current.hidden = age > Number(timeout));
    next.textContent = left >= 1 ? `next in about ${readable(left)}` : "the next is due now";
    // A page that is loaded after it was due is loaded anew every five seconds, and every minute if it is stale.
    const pause = current.hidden ? 60 : 5;
    if (left < -1 && Date.now() - loaded >= 1000 * pause) location.reload();
  }
  function readable(seconds) {
    const whole = Math.round(seconds);
    return whole < 120 ? `${whole} s` : `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  }
  check();
  setInterval(check, 1000);
}
