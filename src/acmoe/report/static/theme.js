// Auto follows the system; the choice is kept where the browser allows it.

const THEMES = ["auto", "light", "dark"];

const themeStore = {
  read() {
    try { return localStorage.getItem("acmoe-theme"); } catch { return null; }
  },
  write(theme) {
    try { localStorage.setItem("acmoe-theme", theme); } catch { /* a page from a file may not store */ }
  },
};

const useTheme = (theme) => {
  const root = document.documentElement;
  if (theme === "auto") delete root.dataset.theme;
  else root.dataset.theme = theme;
  $("theme").textContent = `Theme: ${theme}`;
};

const startTheme = () => {
  let theme = THEMES.includes(themeStore.read()) ? themeStore.read() : "auto";
  useTheme(theme);
  $("theme").addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    themeStore.write(theme);
    useTheme(theme);
  });
};
