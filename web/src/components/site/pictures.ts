// pictures.ts: the drawings beside the explained terms: the inside of an SVG of 160 x 80, in the site's colours.

const line = (d: string, kind = "a"): string => `<path class="${kind}" d="${d}"/>`;
const box = (x: number, y: number, w: number, h: number, kind = "f"): string =>
  `<rect class="${kind}" x="${x}" y="${y}" width="${w}" height="${h}" rx="3"/>`;
const dot = (x: number, y: number, r = 4, kind = "f"): string => `<circle class="${kind}" cx="${x}" cy="${y}" r="${r}"/>`;
const word = (x: number, y: number, text: string): string => `<text x="${x}" y="${y}">${text}</text>`;

const AXES = line("M14 8V68H152", "s");
const BARS = [44, 30, 18, 10, 6, 4];

export const pictures: Readonly<Record<string, string>> = {
  falling: AXES + line("M16 14C30 50 48 54 80 58S130 63 150 64"),
  split: box(12, 30, 106, 20) + box(122, 30, 26, 20, "g") + word(40, 68, "training") + word(112, 68, "unseen"),
  lines: AXES + [20, 36, 46, 54].map((y) => line(`M14 ${y}H152`, "d")).join("") + line("M16 10C24 44 40 50 70 56S130 61 150 62"),
  step: [0, 1, 2, 3].map((k) => box(14 + 36 * k, 56 - 13 * k, 30, 12 + 13 * k, k === 3 ? "f" : "g")).join("") + line("M20 22L52 10", "s"),
  network: [20, 40, 60].flatMap((a) => [14, 32, 50, 68].map((b) => line(`M36 ${a}L80 ${b}`, "s") + line(`M80 ${b}L124 ${a}`, "s"))).join("")
    + [20, 40, 60].map((y) => dot(36, y) + dot(124, y)).join("") + [14, 32, 50, 68].map((y) => dot(80, y)).join(""),
  window: [0, 1, 2, 3, 4, 5, 6, 7].map((k) => box(10 + 18 * k, 32, 14, 18, k > 2 && k < 7 ? "f" : "g")).join("") + line("M58 24V20H140V24", "a") + word(72, 70, "seen"),
  tokens: ["R", "O", "M", "E", "O"].map((letter, k) => box(12 + 28 * k, 26, 24, 28, "o") + word(19 + 28 * k, 45, letter)).join(""),
  sizes: ([[13, 8], [31, 13], [54, 19], [81, 26], [114, 34]] as const).map(([x, s], k) => box(x, 68 - s * 1.6, s * 0.8 + 6, s * 1.6, k === 1 ? "f" : "g")).join(""),
  chips: box(24, 22, 40, 36, "o") + word(33, 45, "CPU") + box(96, 22, 40, 36) + `<text class="i" x="105" y="45">GPU</text>`,
  dice: box(32, 20, 40, 40, "o") + dot(42, 30) + dot(62, 50) + dot(52, 40) + box(90, 20, 40, 40, "o") + dot(100, 30) + dot(120, 50) + dot(100, 50) + dot(120, 30),
  temperature: line("M10 66C40 66 46 12 56 12S74 66 100 66", "a") + line("M10 62C50 60 40 44 70 44S110 60 150 62", "d") + word(60, 14, "cold") + word(112, 52, "hot"),
  cut: BARS.map((h, k) => box(18 + 22 * k, 64 - h, 16, h, k < 3 ? "f" : "g")).join("") + line("M82 8V70", "d"),
  bars: BARS.map((h, k) => box(18 + 22 * k, 64 - h, 16, h, k === 0 ? "f" : "g")).join("") + line("M12 66H150", "s"),
  arcs: [0, 1, 2, 3, 4, 5].map((k) => dot(16 + 26 * k, 62, 4, k === 5 ? "f" : "g")).join("") + line("M146 56C130 8 50 8 42 56", "a") + line("M146 56C138 34 124 34 120 56", "s"),
  schedule: AXES + line("M16 66L36 16C70 16 96 58 150 62"),
  arrow: dot(30, 56) + line("M34 53L118 22") + line("M106 20L120 21L112 33") + line("M30 56L60 45", "d"),
  loop: box(24, 30, 112, 22, "g") + line("M136 30C150 6 10 6 24 30") + line("M17 20L24 31L34 22"),
};
