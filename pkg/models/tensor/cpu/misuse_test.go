package cpu_test

import (
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/cpu"
)

// mustPanic checks that a misuse panics with a message of this package that says what.
func mustPanic(t *testing.T, name, want string, f func()) {
	t.Helper()
	defer func() {
		t.Helper()
		v := recover()
		s, ok := v.(string)
		if !ok || !strings.HasPrefix(s, "tensor: ") || !strings.Contains(s, want) {
			t.Errorf("%s: panic %v, want one of tensor with %q", name, v, want)
		}
	}()
	f()
}

func TestMisusePanics(t *testing.T) {
	c := cpu.NewCPU(nil)
	m := func(r, k int) cpu.Matrix { return cpu.NewMatrix(make([]float32, r*k), r, k) }
	w := cpu.Pack(make([]float32, 6), 2, 3)
	att := tensor.Attention{Heads: 2}
	im := cpu.NewImage(make([]float32, 48), 1, 4, 4, 3)
	k3 := cpu.PackConv(make([]float32, 2*3*9), 2, 3, 3, 3)
	for _, x := range []struct {
		name, want string
		f          func()
	}{
		{"matrix over too little", "4 x 4 over 15", func() { cpu.NewMatrix(make([]float32, 15), 4, 4) }},
		{"negative matrix", "-1 x -1", func() { cpu.NewMatrix(nil, -1, -1) }},
		{"rows outside", "rows 1:5 of 4", func() { m(4, 4).SliceRows(1, 5) }},
		{"columns outside", "columns 3:2 of 4", func() { m(4, 4).SliceCols(3, 2) }},
		{"pack", "weight of 5 elements", func() { cpu.Pack(make([]float32, 5), 2, 3) }},
		{"pack nothing", "pack a weight of 0 x 3", func() { cpu.Pack(nil, 0, 3) }},
		{"pack stacked", "stacked weight", func() { cpu.PackStacked(3, make([]float32, 4)) }},
		{"linear x", "linear: x", func() { c.Linear(m(4, 2), m(4, 4), w, cpu.Epilogue{}) }},
		{"linear dst", "linear: dst", func() { c.Linear(m(4, 3), m(4, 3), w, cpu.Epilogue{}) }},
		{"short data", "has 11 elements", func() {
			c.Linear(m(4, 2), cpu.Matrix{Data: make([]float32, 11), Rows: 4, Cols: 3, Stride: 3}, w, cpu.Epilogue{})
		}},
		{"stride below the columns", "stride 2", func() {
			c.Linear(m(4, 2), cpu.Matrix{Data: make([]float32, 12), Rows: 4, Cols: 3, Stride: 2}, w, cpu.Epilogue{})
		}},
		{"bias", "bias of 3", func() { c.Linear(m(4, 2), m(4, 3), w, cpu.Epilogue{Bias: make([]float32, 3)}) }},
		{"residual", "residual", func() { c.Linear(m(4, 2), m(4, 3), w, cpu.Epilogue{Residual: m(3, 2)}) }},
		{"gate group", "row group 1 of 1", func() {
			c.Linear(m(1, 2), m(1, 3), w, cpu.Epilogue{Gate: m(1, 2), Group: []int32{1}})
		}},
		{"group length", "2 row groups for 1 rows", func() {
			c.Linear(m(1, 2), m(1, 3), w, cpu.Epilogue{Gate: m(1, 2), Group: []int32{0, 0}})
		}},
		{"activation", "unknown activation", func() { c.Linear(m(1, 2), m(1, 3), w, cpu.Epilogue{Act: 9}) }},
		{"heads", "3 key heads", func() {
			c.Attention(m(4, 8), m(4, 8), m(4, 6), m(4, 6),
				tensor.Attention{Heads: 2, KVHeads: 3})
		}},
		{"no heads", "0 heads", func() { c.Attention(m(4, 8), m(4, 8), m(4, 8), m(4, 8), tensor.Attention{}) }},
		{"head columns", "attention: q", func() { c.Attention(m(4, 9), m(4, 9), m(4, 8), m(4, 8), att) }},
		{"keys and values", "attention: v", func() { c.Attention(m(4, 8), m(4, 8), m(5, 8), m(4, 8), att) }},
		{"scale", "scale -1", func() {
			c.Attention(m(4, 8), m(4, 8), m(4, 8), m(4, 8), tensor.Attention{Heads: 2, Scale: -1})
		}},
		{"mask", "mask of 3 keys", func() {
			c.Attention(m(4, 8), m(4, 8), m(4, 8), m(4, 8), tensor.Attention{Heads: 2, Mask: make([]bool, 3)})
		}},
		{"sequence row", "row 4 of 4", func() {
			c.Attention(m(4, 8), m(4, 8), m(4, 8), m(4, 8), tensor.Attention{Heads: 2, Sequences: [][]int32{{4}}})
		}},
		{"sequences of two lengths", "as many queries", func() {
			c.Attention(m(4, 8), m(4, 8), m(5, 8), m(5, 8), tensor.Attention{Heads: 2, Sequences: [][]int32{{1}}})
		}},
		{"silu mul", "silu mul: y", func() { c.SiLUMul(m(2, 2), m(2, 2), m(2, 3)) }},
		{"norm weight", "3 weights for 4 columns", func() { c.RMSNorm(m(2, 4), m(2, 4), make([]float32, 3), 1e-6) }},
		{"modulation", "modulate: shift", func() { c.LayerNormModulate(m(2, 4), m(2, 4), m(1, 4), m(2, 4), nil, 1e-6) }},
		{"rope columns", "rope: 6 columns, 2 angles", func() { c.RopePairs(m(2, 6), m(2, 6), m(2, 2), m(2, 2), nil) }},
		{"rope rows", "rope: 3 rows, angles of 2", func() { c.RopeHalves(m(3, 4), m(3, 4), m(2, 2), m(2, 2), nil) }},
		{"gather", "gather row -1 of 4", func() { c.Gather(m(1, 2), m(4, 2), []int32{-1}) }},
		{"convolution", "convolution", func() {
			c.Conv2D(cpu.NewImage(make([]float32, 32), 1, 4, 4, 2), im, k3, tensor.Conv{}, cpu.Epilogue{})
		}},
		{"convolution weight", "convolution weight", func() { cpu.PackConv(make([]float32, 5), 2, 3, 1, 1) }},
		{"upsample", "upsample", func() { c.Upsample2(im, im) }},
		{"arena", "negative", func() { new(cpu.Arena).Floats(-1) }},
	} {
		mustPanic(t, x.name, x.want, x.f)
	}
	if _, err := cpu.NewCPUWith(nil, "sse"); err == nil || !strings.Contains(err.Error(), `"sse"`) {
		t.Errorf("unknown kernels: error %v", err)
	}
}

func TestPacked_RoundTrip(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for _, s := range [][2]int{{1, 1}, {16, 3}, {17, 5}, {40, 33}} {
		w := random(r, s[0]*s[1])
		p := cpu.Pack(w, s[0], s[1])
		got := make([]float32, len(w))
		p.Unpack(got)
		wantBits(t, "unpacked", got, w)
		cut := s[0] / 2 * s[1]
		cpu.PackStacked(s[1], w[:cut], w[cut:]).Unpack(got)
		wantBits(t, "stacked", got, w)
	}
}

func TestArena(t *testing.T) {
	var a cpu.Arena
	pass := func() {
		for _, n := range []int{10, 5000, 1, 100_000} {
			x := a.Floats(n)
			if len(x) != n || cap(x) != n {
				t.Fatalf("got %d of %d elements", len(x), n)
			}
			for i := range x {
				x[i] = float32(n)
			}
		}
	}
	first := a.Floats(15)
	for i := range first {
		first[i] = -1
	}
	pass()
	for _, v := range first {
		if v != -1 {
			t.Fatal("two slices share memory")
		}
	}
	a.Reset()
	held := a.Bytes()
	if n := testing.AllocsPerRun(5, func() { a.Reset(); pass() }); n != 0 {
		t.Errorf("%v allocations in a repeated pass", n)
	}
	if a.Bytes() != held || held > 4*300_000 {
		t.Errorf("holds %d bytes, then %d", held, a.Bytes())
	}
}

// CPUs of many goroutines share one pool.
func TestPool_Shared(t *testing.T) {
	pool := cpu.NewPool(3)
	defer pool.Close()
	r := rand.New(rand.NewPCG(1, 1))
	const m, n, k = 200, 128, 256
	x, w := cpu.NewMatrix(random(r, m*k), m, k), cpu.Pack(random(r, n*k), n, k)
	want := cpu.NewMatrix(make([]float32, m*n), m, n)
	cpu.NewCPU(nil).Linear(want, x, w, cpu.Epilogue{})
	var wg sync.WaitGroup
	for range 6 {
		wg.Go(func() {
			c := cpu.NewCPU(pool)
			for range 5 {
				y := cpu.NewMatrix(make([]float32, m*n), m, n)
				c.Linear(y, x, w, cpu.Epilogue{})
				for i := range want.Data {
					if y.Data[i] != want.Data[i] {
						t.Errorf("element %d: %v, want %v", i, y.Data[i], want.Data[i])
						return
					}
				}
			}
		})
	}
	wg.Wait()
}

func TestCPU_DoesNotAllocate(t *testing.T) {
	pool := cpu.NewPool(2)
	defer pool.Close()
	r := rand.New(rand.NewPCG(1, 1))
	m := func(rows, cols int) cpu.Matrix { return cpu.NewMatrix(random(r, rows*cols), rows, cols) }
	const l, d = 300, 96
	x, y, qkv, cos := m(l, d), m(l, d), m(l, 3*d), m(l, 16)
	w, mod, group := cpu.Pack(random(r, d*d), d, d), m(2, d), make([]int32, l)
	im, out := cpu.NewImage(random(r, 32*32*16), 1, 32, 32, 16), cpu.NewImage(make([]float32, 32*32*16), 1, 32, 32, 16)
	kernel := cpu.PackConv(random(r, 16*16*9), 16, 16, 3, 3)
	seqs := [][]int32{{0, 1, 2, 200}, {3, 4, 5}}
	mask := make([]bool, l)
	for _, p := range []*cpu.Pool{nil, pool} {
		c := cpu.NewCPU(p)
		for name, f := range map[string]func(){
			"linear": func() { c.Linear(x, y, w, cpu.Epilogue{Gate: mod, Residual: x, Group: group, Act: tensor.GELU}) },
			"attention": func() {
				c.Attention(y, qkv.SliceCols(0, d), qkv.SliceCols(d, 2*d), qkv.SliceCols(2*d, 3*d),
					tensor.Attention{Heads: 3, Causal: true})
			},
			"sequences": func() {
				c.Attention(y, qkv.SliceCols(0, d), qkv.SliceCols(d, 2*d), qkv.SliceCols(2*d, 3*d),
					tensor.Attention{Heads: 3, Sequences: seqs, Mask: mask})
			},
			"norms": func() {
				c.LayerNormModulate(y, x, mod, mod, group, 1e-6)
				c.RMSNorm(y, y, cos.Data[:32], 1e-6)
				c.L2Norm(y, y, cos.Data[:32], 1e-6, tensor.SiLU)
			},
			"rope":     func() { c.RopePairs(y, y, cos, cos, nil) },
			"elements": func() { c.SiLUMul(y, y, x) },
			"conv":     func() { c.Conv2D(out, im, kernel, tensor.SamePad(3), cpu.Epilogue{Act: tensor.SiLU}) },
		} {
			if n := testing.AllocsPerRun(10, f); n != 0 {
				t.Errorf("%s, %d threads: %v allocations", name, p.Threads(), n)
			}
		}
	}
}

func TestCPU_MeasurePeak(t *testing.T) {
	for _, k := range cpu.AvailableKernels() {
		peak := newCPU(t, nil, k).MeasurePeak(1)
		if (peak > 0) != (k != cpu.KernelsGo) {
			t.Errorf("%s: peak %v", k, peak)
		}
	}
}

// Sessions at work are not counted, and the others once.
func TestDevice_WorkingBytes(t *testing.T) {
	t.Parallel()
	d, err := cpu.NewDevice(cpu.Options{Threads: 3})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = d.Close() }()
	all := d.WorkingBytes()
	err = d.Run(t.Context(), false, func(tensor.Session) error {
		two := d.WorkingBytes()
		return d.Run(t.Context(), false, func(tensor.Session) error {
			if one := d.WorkingBytes(); one <= 0 || all-two != two-one || two == one {
				t.Errorf("%d bytes of three free sessions, %d of two, %d of one", all, two, one)
			}
			return nil
		})
	})
	if err != nil {
		t.Fatal(err)
	}
}
