document.getElementById("copy")?.addEventListener("click", (event) => {
  navigator.clipboard?.writeText(document.getElementById("next").textContent);
  event.target.textContent = "copied";
});
