// Starting a run from a recipe, which can be changed before.
// @ts-check
import { ask, byId, el } from "/assets/studio.js";

const OWN = "typed below";

const offer = async () => {
  byId("start-refused").textContent = "";
  const names = await ask("/api/runs/recipes");
  byId("start-recipe").replaceChildren(...[OWN, ...names].map((name) => el("option", { value: name }, name)));
  byId("start").showModal();
};
byId("begin").addEventListener("click", offer);
byId("start-recipe").addEventListener("input", async () => {
  const name = byId("start-recipe").value;
  if (name !== OWN) byId("start-text").value = (await ask(`/api/runs/recipe?${new URLSearchParams({ name })}`)).recipe;
});
byId("start-text").addEventListener("input", () => { byId("start-recipe").value = OWN; });
byId("start-no").addEventListener("click", () => byId("start").close());
byId("start-yes").addEventListener("click", async () => {
  const name = byId("start-name").value;
  try {
    await ask("/api/runs/start", { body: { name, recipe: byId("start-text").value } });
    location.href = `/run#${new URLSearchParams({ run: name })}`;
  } catch (error) {
    byId("start-refused").textContent = /** @type {Error} */ (error).message;
  }
});
