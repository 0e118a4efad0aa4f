const alive = document.getElementById("alive"), silent = document.getElementById("silent");
function look() {
  const seconds = (Date.now() - Date.parse(silent.dataset.written)) / 1000;
  silent.hidden = !(alive.hidden = seconds > Number(silent.dataset.patience));
}
look();
setInterval(look, 5000);
