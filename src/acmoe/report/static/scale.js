// Axes: where a value lies, and round numbers to write beside them.

/** Maps [low, high] onto [from, to], on a linear or a logarithmic axis, and back. */
const axis = (low, high, from, to, log) => {
  const enter = log ? Math.log10 : (x) => x;
  const leave = log ? (x) => 10 ** x : (x) => x;
  const [a, b] = [enter(low), enter(high)];
  const width = b - a || 1;
  return {
    at: (x) => from + ((enter(x) - a) / width) * (to - from),
    value: (place) => leave(a + ((place - from) / (to - from)) * width),
    ticks: () => (log ? logTicks(low, high) : linearTicks(low, high)),
  };
};

const linearTicks = (low, high, wanted = 5) => {
  if (!(high > low)) return [low];
  const rough = (high - low) / wanted;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ([1, 2, 5, 10].find((factor) => factor * power >= rough) ?? 10);
  const ticks = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n += 1) {
    ticks.push(Number((n * step).toPrecision(12)));
  }
  return ticks;
};

/** 1, 2 and 5 times powers of ten; where less than two lie inside, linear ones. */
const logTicks = (low, high) => {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
    for (const factor of [1, 2, 5]) {
      const tick = Number((factor * 10 ** power).toPrecision(3));
      if (tick >= low && tick <= high) ticks.push(tick);
    }
  }
  if (ticks.length < 2) return linearTicks(low, high);
  const decades = ticks.filter((tick) => Number.isInteger(Math.log10(tick)));
  return ticks.length > 9 && decades.length > 1 ? decades : ticks;
};

/** Exponential average without the pull of its first value; `weight` 0 leaves all as it is. */
const smoothed = (values, weight) => {
  let total = 0;
  let mass = 0;
  return values.map((value) => {
    total = weight * total + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return total / mass;
  });
};
