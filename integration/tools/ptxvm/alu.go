package ptxvm

import (
	"math"
	"math/bits"
)

// v32 and v64 are a slot: one value for each lane.
type (
	v32 = [32]uint32
	v64 = [32]uint64
)

func each1(d, a *v32, f func(x uint32) uint32) {
	for i := range d {
		d[i] = f(a[i])
	}
}

func each2(d, a, b *v32, f func(x, y uint32) uint32) {
	for i := range d {
		d[i] = f(a[i], b[i])
	}
}

func each3(d, a, b, c *v32, f func(x, y, z uint32) uint32) {
	for i := range d {
		d[i] = f(a[i], b[i], c[i])
	}
}

func long1(d, a *v64, f func(x uint64) uint64) {
	for i := range d {
		d[i] = f(a[i])
	}
}

func long2(d, a, b *v64, f func(x, y uint64) uint64) {
	for i := range d {
		d[i] = f(a[i], b[i])
	}
}

// widen and narrow go from bank to bank.
func widen(d *v64, a *v32, f func(x uint32) uint64) {
	for i := range d {
		d[i] = f(a[i])
	}
}

func narrow(d *v32, a *v64, f func(x uint64) uint32) {
	for i := range d {
		d[i] = f(a[i])
	}
}

func shiftLong(d, a *v64, b *v32, f func(x uint64, n uint32) uint64) {
	for i := range d {
		d[i] = f(a[i], b[i])
	}
}

// approx is a function of hardware, computed in float64.
type approx func(x float64) float64

// divides marks an operation whose result by a divisor 0 is unspecified.
type divides func(d, a, b *v32)

// alu is the meaning of instructions that work lane by lane, by their full name; the
// types of the functions say which banks their operands are in. Several names have one
// meaning: aliases adds them.
var alu = map[string]any{
	"add.f32":    func(d, a, b *v32) { each2(d, a, b, func(x, y uint32) uint32 { return b32(f32(x) + f32(y)) }) },
	"sub.f32":    func(d, a, b *v32) { each2(d, a, b, func(x, y uint32) uint32 { return b32(f32(x) - f32(y)) }) },
	"mul.f32":    func(d, a, b *v32) { each2(d, a, b, func(x, y uint32) uint32 { return b32(f32(x) * f32(y)) }) },
	"div.rn.f32": func(d, a, b *v32) { each2(d, a, b, func(x, y uint32) uint32 { return b32(f32(x) / f32(y)) }) },
	"rcp.rn.f32": func(d, a *v32) { each1(d, a, func(x uint32) uint32 { return b32(1 / f32(x)) }) },
	"sqrt.rn.f32": func(d, a *v32) {
		each1(d, a, func(x uint32) uint32 { return b32(float32(math.Sqrt(float64(f32(x))))) })
	},
	"fma.rn.f32": fma,
	"max.f32":    func(d, a, b *v32) { each2(d, a, b, maxF32) },
	"min.f32":    func(d, a, b *v32) { each2(d, a, b, minF32) },
	"neg.f32":    func(d, a *v32) { each1(d, a, func(x uint32) uint32 { return x ^ 1<<31 }) },
	"abs.f32":    func(d, a *v32) { each1(d, a, func(x uint32) uint32 { return x &^ (1 << 31) }) },

	"ex2.approx.ftz.f32":   approx(exp2),
	"lg2.approx.ftz.f32":   approx(math.Log2),
	"rsqrt.approx.ftz.f32": approx(func(x float64) float64 { return 1 / math.Sqrt(x) }),
	"rcp.approx.ftz.f32":   approx(func(x float64) float64 { return 1 / x }),
	"sqrt.approx.ftz.f32":  approx(math.Sqrt),

	"add.s32":    func(d, a, b *v32) { each2(d, a, b, func(x, y uint32) uint32 { return x + y }) },
	"sub.s32":    func(d, a, b *v32) { each2(d, a, b, func(x, y uint32) uint32 { return x - y }) },
	"mul.lo.s32": func(d, a, b *v32) { each2(d, a, b, func(x, y uint32) uint32 { return x * y }) },
	"mad.lo.s32": func(d, a, b, c *v32) { each3(d, a, b, c, func(x, y, z uint32) uint32 { return x*y + z }) },
	"mul.hi.u32": func(d, a, b *v32) {
		each2(d, a, b, func(x, y uint32) uint32 { return uint32(uint64(x) * uint64(y) >> 32) })
	},
	"mul.hi.s32": func(d, a, b *v32) {
		each2(d, a, b, func(x, y uint32) uint32 { return uint32(int64(int32(x)) * int64(int32(y)) >> 32) })
	},
	"div.s32": divides(func(d, a, b *v32) {
		each2(d, a, b, func(x, y uint32) uint32 { return uint32(int32(x) / int32(max(y, 1))) })
	}),
	"div.u32": divides(func(d, a, b *v32) { each2(d, a, b, func(x, y uint32) uint32 { return x / max(y, 1) }) }),
	"rem.s32": divides(func(d, a, b *v32) {
		each2(d, a, b, func(x, y uint32) uint32 { return uint32(int32(x) % int32(max(y, 1))) })
	}),
	"rem.u32": divides(func(d, a, b *v32) { each2(d, a, b, func(x, y uint32) uint32 { return x % max(y, 1) }) }),
	"max.s32": func(d, a, b *v32) {
		each2(d, a, b, func(x, y uint32) uint32 { return uint32(max(int32(x), int32(y))) })
	},
	"min.s32": func(d, a, b *v32) {
		each2(d, a, b, func(x, y uint32) uint32 { return uint32(min(int32(x), int32(y))) })
	},
	"max.u32": func(d, a, b *v32) { each2(d, a, b, func(x, y uint32) uint32 { return max(x, y) }) },
	"min.u32": func(d, a, b *v32) { each2(d, a, b, func(x, y uint32) uint32 { return min(x, y) }) },
	"neg.s32": func(d, a *v32) { each1(d, a, func(x uint32) uint32 { return -x }) },
	"abs.s32": func(d, a *v32) { each1(d, a, func(x uint32) uint32 { return uint32(max(int32(x), -int32(x))) }) },

	"and.b32": func(d, a, b *v32) { each2(d, a, b, func(x, y uint32) uint32 { return x & y }) },
	"or.b32":  func(d, a, b *v32) { each2(d, a, b, func(x, y uint32) uint32 { return x | y }) },
	"xor.b32": func(d, a, b *v32) { each2(d, a, b, func(x, y uint32) uint32 { return x ^ y }) },
	"not.b32": func(d, a *v32) { each1(d, a, func(x uint32) uint32 { return ^x }) },
	"shl.b32": func(d, a, b *v32) { each2(d, a, b, func(x, n uint32) uint32 { return x << min(n, 32) }) },
	"shr.u32": func(d, a, b *v32) { each2(d, a, b, func(x, n uint32) uint32 { return x >> min(n, 32) }) },
	"shr.s32": func(d, a, b *v32) {
		each2(d, a, b, func(x, n uint32) uint32 { return uint32(int32(x) >> min(n, 31)) })
	},
	"bfe.u32":  func(d, a, b, c *v32) { each3(d, a, b, c, bitField) },
	"prmt.b32": func(d, a, b, c *v32) { each3(d, a, b, c, permute) },
	"popc.b32": func(d, a *v32) { each1(d, a, func(x uint32) uint32 { return uint32(bits.OnesCount32(x)) }) },

	"add.s16":    func(d, a, b *v32) { each2(d, a, b, func(x, y uint32) uint32 { return (x + y) & 0xffff }) },
	"sub.s16":    func(d, a, b *v32) { each2(d, a, b, func(x, y uint32) uint32 { return (x - y) & 0xffff }) },
	"mul.lo.s16": func(d, a, b *v32) { each2(d, a, b, func(x, y uint32) uint32 { return x * y & 0xffff }) },
	"mul.hi.u16": func(d, a, b *v32) {
		each2(d, a, b, func(x, y uint32) uint32 { return (x & 0xffff) * (y & 0xffff) >> 16 })
	},
	"mul.wide.u16": func(d, a, b *v32) {
		each2(d, a, b, func(x, y uint32) uint32 { return (x & 0xffff) * (y & 0xffff) })
	},
	"shr.u16": func(d, a, b *v32) {
		each2(d, a, b, func(x, n uint32) uint32 { return x & 0xffff >> min(n, 16) })
	},
	"mul.wide.s16": func(d, a, b *v32) {
		each2(d, a, b, func(x, y uint32) uint32 { return uint32(int32(int16(x)) * int32(int16(y))) })
	},
	"shr.s16": func(d, a, b *v32) {
		each2(d, a, b, func(x, n uint32) uint32 { return uint32(int16(x)>>min(n, 15)) & 0xffff })
	},
	"shl.b16": func(d, a, b *v32) {
		each2(d, a, b, func(x, n uint32) uint32 { return x << min(n, 16) & 0xffff })
	},

	"add.s64":    func(d, a, b *v64) { long2(d, a, b, func(x, y uint64) uint64 { return x + y }) },
	"sub.s64":    func(d, a, b *v64) { long2(d, a, b, func(x, y uint64) uint64 { return x - y }) },
	"mul.lo.s64": func(d, a, b *v64) { long2(d, a, b, func(x, y uint64) uint64 { return x * y }) },
	"and.b64":    func(d, a, b *v64) { long2(d, a, b, func(x, y uint64) uint64 { return x & y }) },
	"or.b64":     func(d, a, b *v64) { long2(d, a, b, func(x, y uint64) uint64 { return x | y }) },
	"xor.b64":    func(d, a, b *v64) { long2(d, a, b, func(x, y uint64) uint64 { return x ^ y }) },
	"not.b64":    func(d, a *v64) { long1(d, a, func(x uint64) uint64 { return ^x }) },
	"neg.s64":    func(d, a *v64) { long1(d, a, func(x uint64) uint64 { return -x }) },
	"max.s64": func(d, a, b *v64) {
		long2(d, a, b, func(x, y uint64) uint64 { return uint64(max(int64(x), int64(y))) })
	},
	"min.s64": func(d, a, b *v64) {
		long2(d, a, b, func(x, y uint64) uint64 { return uint64(min(int64(x), int64(y))) })
	},
	"shl.b64": func(d, a *v64, b *v32) {
		shiftLong(d, a, b, func(x uint64, n uint32) uint64 { return x << min(n, 64) })
	},
	"shr.u64": func(d, a *v64, b *v32) {
		shiftLong(d, a, b, func(x uint64, n uint32) uint64 { return x >> min(n, 64) })
	},
	"shr.s64": func(d, a *v64, b *v32) {
		shiftLong(d, a, b, func(x uint64, n uint32) uint64 { return uint64(int64(x) >> min(n, 63)) })
	},
	"mul.wide.u32": func(d *v64, a, b *v32) {
		for i := range d {
			d[i] = uint64(a[i]) * uint64(b[i])
		}
	},
	"mul.wide.s32": func(d *v64, a, b *v32) {
		for i := range d {
			d[i] = uint64(int64(int32(a[i])) * int64(int32(b[i])))
		}
	},
	"mad.wide.u32": func(d *v64, a, b *v32, c *v64) {
		for i := range d {
			d[i] = uint64(a[i])*uint64(b[i]) + c[i]
		}
	},
	"mad.wide.s32": func(d *v64, a, b *v32, c *v64) {
		for i := range d {
			d[i] = uint64(int64(int32(a[i]))*int64(int32(b[i]))) + c[i]
		}
	},

	"mov.b32": func(d, a *v32) { *d = *a },
	"mov.b64": func(d, a *v64) { *d = *a },

	"and.pred": func(x, y uint32) uint32 { return x & y },
	"or.pred":  func(x, y uint32) uint32 { return x | y },
	"xor.pred": func(x, y uint32) uint32 { return x ^ y },
	"not.pred": func(x uint32) uint32 { return ^x },
	"mov.pred": func(x uint32) uint32 { return x },

	"cvt.rn.f32.s32":  func(d, a *v32) { each1(d, a, func(x uint32) uint32 { return b32(float32(int32(x))) }) },
	"cvt.rn.f32.u32":  func(d, a *v32) { each1(d, a, func(x uint32) uint32 { return b32(float32(x)) }) },
	"cvt.rzi.s32.f32": func(d, a *v32) { each1(d, a, func(x uint32) uint32 { return toS32(x, math.Trunc) }) },
	"cvt.rni.s32.f32": func(d, a *v32) { each1(d, a, func(x uint32) uint32 { return toS32(x, math.RoundToEven) }) },
	"cvt.rmi.s32.f32": func(d, a *v32) { each1(d, a, func(x uint32) uint32 { return toS32(x, math.Floor) }) },
	"cvt.rni.f32.f32": func(d, a *v32) { each1(d, a, func(x uint32) uint32 { return toWhole(x, math.RoundToEven) }) },
	"cvt.rmi.f32.f32": func(d, a *v32) { each1(d, a, func(x uint32) uint32 { return toWhole(x, math.Floor) }) },
	"cvt.rzi.f32.f32": func(d, a *v32) { each1(d, a, func(x uint32) uint32 { return toWhole(x, math.Trunc) }) },
	"cvt.rn.bf16.f32": func(d, a *v32) { each1(d, a, toBF16) },
	"cvt.rn.bf16x2.f32": func(d, a, b *v32) {
		each2(d, a, b, func(x, y uint32) uint32 { return toBF16(x)<<16 | toBF16(y) })
	},
	"cvt.u32.u16": func(d, a *v32) { each1(d, a, func(x uint32) uint32 { return x & 0xffff }) },
	"cvt.s32.s16": func(d, a *v32) { each1(d, a, func(x uint32) uint32 { return uint32(int32(int16(x))) }) },
	"cvt.s32.s8":  func(d, a *v32) { each1(d, a, func(x uint32) uint32 { return uint32(int32(int8(x))) }) },
	"cvt.s16.s8":  func(d, a *v32) { each1(d, a, func(x uint32) uint32 { return uint32(int16(int8(x))) & 0xffff }) },
	"cvt.u64.u32": func(d *v64, a *v32) { widen(d, a, func(x uint32) uint64 { return uint64(x) }) },
	"cvt.s64.s32": func(d *v64, a *v32) { widen(d, a, func(x uint32) uint64 { return uint64(int64(int32(x))) }) },
	"cvt.u64.u16": func(d *v64, a *v32) { widen(d, a, func(x uint32) uint64 { return uint64(x & 0xffff) }) },
	"cvt.u32.u64": func(d *v32, a *v64) { narrow(d, a, func(x uint64) uint32 { return uint32(x) }) },
	"cvt.u16.u64": func(d *v32, a *v64) { narrow(d, a, func(x uint64) uint32 { return uint32(x & 0xffff) }) },
}

// aliases are names of one meaning.
var aliases = map[string][]string{
	"add.f32":     {"add.rn.f32"},
	"sub.f32":     {"sub.rn.f32"},
	"mul.f32":     {"mul.rn.f32"},
	"add.s32":     {"add.u32"},
	"sub.s32":     {"sub.u32"},
	"mul.lo.s32":  {"mul.lo.u32"},
	"mad.lo.s32":  {"mad.lo.u32"},
	"add.s64":     {"add.u64"},
	"sub.s64":     {"sub.u64"},
	"mul.lo.s64":  {"mul.lo.u64"},
	"add.s16":     {"add.u16"},
	"sub.s16":     {"sub.u16"},
	"mul.lo.s16":  {"mul.lo.u16"},
	"and.b32":     {"and.b16"},
	"or.b32":      {"or.b16"},
	"xor.b32":     {"xor.b16"},
	"shl.b32":     {"shl.u32"},
	"shr.u32":     {"shr.b32"},
	"shr.u64":     {"shr.b64"},
	"mov.b32":     {"mov.u32", "mov.s32", "mov.f32", "mov.b16", "mov.u16"},
	"mov.b64":     {"mov.u64", "mov.s64", "mov.f64"},
	"cvt.u32.u16": {"cvt.u16.u32"},
	"cvt.s16.s8":  {"cvt.s8.s32"},
	"cvt.u32.u64": {"cvt.s32.s64"},
}

func toS32(x uint32, round func(float64) float64) uint32 {
	return uint32(int32(toInt(round(float64(f32(x))), math.MinInt32, math.MaxInt32)))
}

func toWhole(x uint32, round func(float64) float64) uint32 {
	return b32(float32(round(float64(f32(x)))))
}

// bitField takes n bits of x from bit at.
func bitField(x, at, n uint32) uint32 {
	return uint32(uint64(x) >> min(at&0xff, 32) & (1<<min(n&0xff, 32) - 1))
}

// permute picks four bytes out of b:a; a selector's bit 3 spreads the sign of its byte.
func permute(a, b, selectors uint32) uint32 {
	both, d := uint64(b)<<32|uint64(a), uint32(0)
	for i := range 4 {
		s := selectors >> (4 * i)
		v := uint32(both>>(8*(s&7))) & 0xff
		if s&8 != 0 {
			v = uint32(int32(int8(v))>>7) & 0xff
		}
		d |= v << (8 * i)
	}
	return d
}

// compares are the meanings of setp, by comparison and type.
var compares = map[string]any{}

func init() {
	for name, others := range aliases {
		for _, other := range others {
			alu[other] = alu[name]
		}
	}
	// want says for which of less, equal, greater a comparison holds.
	for name, want := range map[string][3]bool{
		"eq": {false, true, false}, "ne": {true, false, true}, "lt": {true, false, false},
		"le": {true, true, false}, "gt": {false, false, true}, "ge": {false, true, true},
		"lo": {true, false, false}, "ls": {true, true, false}, "hi": {false, false, true}, "hs": {false, true, true},
	} {
		for _, t := range []string{"s32", "u32", "b32", "s16", "u16", "b16"} {
			compares[name+"."+t] = compare32(want, key32(t))
		}
		for _, t := range []string{"s64", "u64", "b64"} {
			compares[name+"."+t] = compare64(want, t == "s64")
		}
		compares[name+".f32"] = compareFloat(want, false)
		compares[name+"u.f32"] = compareFloat(want, true)
	}
	compares["num.f32"] = compareFloat([3]bool{true, true, true}, false)
	compares["nan.f32"] = compareFloat([3]bool{}, true)
}

// key32 maps a type to unsigned numbers of the same order.
func key32(t string) func(x uint32) uint32 {
	switch t {
	case "s32":
		return func(x uint32) uint32 { return x ^ 1<<31 }
	case "s16":
		return func(x uint32) uint32 { return x<<16 ^ 1<<31 }
	case "u16", "b16":
		return func(x uint32) uint32 { return x << 16 }
	}
	return func(x uint32) uint32 { return x }
}

func flag(b bool, lane int) uint32 {
	if b {
		return 1 << lane
	}
	return 0
}

func compare32(want [3]bool, key func(uint32) uint32) func(a, b *v32) uint32 {
	return func(a, b *v32) (m uint32) {
		for i := range a {
			x, y := key(a[i]), key(b[i])
			m |= flag(x < y && want[0] || x == y && want[1] || x > y && want[2], i)
		}
		return m
	}
}

func compare64(want [3]bool, signed bool) func(a, b *v64) uint32 {
	offset := uint64(0)
	if signed {
		offset = 1 << 63
	}
	return func(a, b *v64) (m uint32) {
		for i := range a {
			x, y := a[i]^offset, b[i]^offset
			m |= flag(x < y && want[0] || x == y && want[1] || x > y && want[2], i)
		}
		return m
	}
}

// compareFloat gives unordered when an operand is NaN.
func compareFloat(want [3]bool, unordered bool) func(a, b *v32) uint32 {
	return func(a, b *v32) (m uint32) {
		for i := range a {
			x, y := f32(a[i]), f32(b[i])
			m |= flag(x < y && want[0] || x == y && want[1] || x > y && want[2] || (x != x || y != y) && unordered, i)
		}
		return m
	}
}
