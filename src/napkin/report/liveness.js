const current = document.getElementById("current"), stale = document.getElementById("stale");
function check() {
  const seconds = (Date.now() - Date.parse(stale.dataset.written)) / 1000;
  stale.hidden = !(current.hidden = seconds > Number(stale.dataset.timeout));
}
check();
setInterval(check, 5000);
