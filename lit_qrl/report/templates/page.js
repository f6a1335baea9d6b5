(() => {
  const form = document.querySelector("form.filter");
  const store = (() => { try { return window.sessionStorage; } catch { return null; } })();
  const key = (name) => location.pathname + " " + name;
  const recall = (name) => (store ? store.getItem(key(name)) : null);
  const keep = (name, value) => { if (store) store.setItem(key(name), value); };
  if (form) {
    const groups = [...document.querySelectorAll("details.iteration")];
    const known = JSON.parse(recall("open") || "null");
    if (known) for (const group of groups) group.open = known.includes(group.dataset.iteration);
    const opened = groups.map((group) => group.open);
    const keepOpen = () => keep("open", JSON.stringify(groups.filter((one) => one.open).map((one) => one.dataset.iteration)));
    for (const group of groups)
      group.querySelector("summary").addEventListener("click", () => setTimeout(() => { if (!filtered) keepOpen(); }));
    let filtered = false;
    const apply = () => {
      const text = form.elements.text.value.toLowerCase();
      const low = form.elements.low.value, high = form.elements.high.value;
      const wanted = text !== "" || low !== "" || high !== "";
      let shown = 0, count = 0;
      groups.forEach((group, index) => {
        let inside = 0;
        for (const sample of group.querySelectorAll(".sample")) {
          const reward = sample.dataset.reward;
          const kept = (text === "" || [...sample.querySelectorAll("pre")].some((one) => one.textContent.toLowerCase().includes(text)))
            && (low === "" || (reward !== "" && Number(reward) >= Number(low)))
            && (high === "" || (reward !== "" && Number(reward) <= Number(high)));
          sample.hidden = !kept;
          inside += kept;
          count += 1;
        }
        shown += inside;
        group.hidden = inside === 0;
        if (!wanted && filtered) group.open = opened[index];
        else if (wanted) { if (!filtered) opened[index] = group.open; group.open = true; }
      });
      filtered = wanted;
      form.querySelector("output").textContent = wanted ? `${shown} of ${count} samples` : `${count} samples`;
      for (const name of ["text", "low", "high"]) keep(name, form.elements[name].value);
    };
    for (const name of ["text", "low", "high"]) form.elements[name].value = recall(name) || "";
    form.hidden = false;
    form.addEventListener("input", apply);
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("reset", () => setTimeout(apply));
    apply();
  }
})();
