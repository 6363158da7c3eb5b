package nn

import (
	"fmt"
	"maps"
	"runtime"
	"slices"
	"sync"

	"github.com/meander-rl/meander/pkg/models/lora"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

// Projection is the place of one projection of a checkpoint in a stacked Linear (several
// projections of one input): rows From to From+N-1 of In, with K columns.
type Projection struct {
	In         *Linear
	From, N, K int
}

// Table returns the shapes of projections, as a lora.Table.
func Table(projections map[string]Projection) lora.Table {
	t := make(lora.Table, len(projections))
	for name, p := range projections {
		t[name] = [2]int{p.N, p.K}
	}
	return t
}

// Adapt adds the sums of low-rank products of adapters to the weights of projections, by the names of modules in a
// checkpoint. It replaces the weights of the Linears that an adapter changes and keeps the others. A sum is
// accumulated in float64 and rounded once; a tensor.LowRankAdder keeps the products beside the weight. An adapter that
// does not fit is an error that names all its wrong modules.
func Adapt(d tensor.Device, projections map[string]Projection, adapters []lora.Weighted) error {
	adapters, err := Table(projections).Fit(adapters...)
	if err != nil {
		return err
	}
	touched := map[string]bool{}
	for _, a := range adapters {
		for _, module := range a.Adapter.Modules() {
			touched[module] = true
		}
	}
	stacked := map[*Linear][]string{} // the modules of each
	for _, module := range slices.Sorted(maps.Keys(touched)) {
		stacked[projections[module].In] = append(stacked[projections[module].In], module)
	}
	for l, modules := range stacked { // one after the other, so that the host memory holds only one
		if adder, ok := d.(tensor.LowRankAdder); ok {
			products := make([]tensor.LowRank, len(modules))
			for i, module := range modules {
				products[i] = projections[module].sum(module, adapters)
			}
			adapted, err := adder.AddLowRank(l.W, products)
			if err != nil {
				return fmt.Errorf("adapter: %s: %w", modules[0], err)
			}
			l.W = adapted
			continue
		}
		w := make([]float32, l.W.N()*l.W.K())
		if err := d.Read(w, l.W); err != nil {
			return fmt.Errorf("adapter: %s: %w", modules[0], err)
		}
		for _, module := range modules {
			projections[module].add(w, module, adapters)
		}
		adapted, err := d.Weight(tensor.Floats(w, l.W.N(), l.W.K()))
		if err != nil {
			return fmt.Errorf("adapter: %s: %w", modules[0], err)
		}
		l.W = adapted
	}
	return nil
}

// sum returns the products of the adapters for a module as one: their ranks one after the other.
func (p Projection) sum(module string, adapters []lora.Weighted) tensor.LowRank {
	all := tensor.LowRank{From: p.From, N: p.N, K: p.K}
	for _, a := range adapters {
		if product := a.Adapter.Product(module); product != nil {
			all.R += product.R
			all.A = append(all.A, product.A...)
		}
	}
	all.B = make([]float32, all.N*all.R)
	at := 0
	for _, a := range adapters {
		product := a.Adapter.Product(module)
		if product == nil {
			continue
		}
		for i, v := range product.B {
			row, rank := i/product.R, i%product.R
			all.B[row*all.R+at+rank] = float32(a.Weight * product.Scale * float64(v))
		}
		at += product.R
	}
	return all
}

// low is the product of an adapter for a module, with its A in float64, which all rows read.
type low struct {
	*lora.Product
	a      []float64
	weight float64
}

// add adds the products of the adapters for a module to its rows of w, on all cores: each row is summed by itself, so
// that the bits do not depend on their number.
func (p Projection) add(w []float32, module string, adapters []lora.Weighted) {
	var lows []low
	for _, a := range adapters {
		if product := a.Adapter.Product(module); product != nil {
			l := low{product, make([]float64, len(product.A)), a.Weight}
			for i, v := range product.A {
				l.a[i] = float64(v)
			}
			lows = append(lows, l)
		}
	}
	var group sync.WaitGroup
	for part, parts := 0, min(runtime.GOMAXPROCS(0), p.N); part < parts; part++ {
		group.Go(func() { p.addRows(w, lows, part*p.N/parts, (part+1)*p.N/parts) })
	}
	group.Wait()
}

// addRows adds products to rows from..to-1 of a module.
func (p Projection) addRows(w []float32, lows []low, from, to int) {
	sum := make([]float64, p.K)
	for row := from; row < to; row++ {
		dst := w[(p.From+row)*p.K : (p.From+row+1)*p.K]
		for j, v := range dst {
			sum[j] = float64(v)
		}
		for _, l := range lows {
			l.addRow(sum, row)
		}
		for j, v := range sum {
			dst[j] = float32(v)
		}
	}
}

// addRow adds a row of weight * scale * B A to sum, rank by rank. Multiply-adds are not fused, so that every
// machine gives the same bits.
func (l low) addRow(sum []float64, row int) {
	c := func(i int) float64 { return l.weight * l.Scale * float64(l.B[row*l.R+i]) }
	at := func(i int) []float64 { return l.a[i*l.K:][:len(sum)] }
	i := 0
	for ; i+4 <= l.R; i += 4 { // four at once: sum is read from memory less often
		c0, c1, c2, c3 := c(i), c(i+1), c(i+2), c(i+3)
		a0, a1, a2, a3 := at(i), at(i+1), at(i+2), at(i+3)
		for j, s := range sum {
			s += float64(c0 * a0[j])
			s += float64(c1 * a1[j])
			s += float64(c2 * a2[j])
			s += float64(c3 * a3[j])
			sum[j] = s
		}
	}
	for ; i < l.R; i++ {
		c, a := c(i), at(i)
		for j := range sum {
			sum[j] += float64(c * a[j])
		}
	}
}
