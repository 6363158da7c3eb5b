package nn

import (
	"fmt"
	"maps"
	"slices"

	"github.com/meander-rl/meander/pkg/lora"
	"github.com/meander-rl/meander/pkg/tensor"
)

// Place is where a projection of a checkpoint lies in a stacked Linear: rows From to
// From+N-1 of In, with K columns.
type Place struct {
	In         *Linear
	From, N, K int
}

// Table is what adapters can change at places.
func Table(places map[string]Place) lora.Table {
	t := make(lora.Table, len(places))
	for name, p := range places {
		t[name] = [2]int{p.N, p.K}
	}
	return t
}

// Adapt adds sums of low-rank products to the weights at places, by the names of modules
// in a checkpoint. It replaces the weights of the Linears that an adapter touches and
// leaves the others alone. A sum is accumulated in float64 and rounded once. An adapter
// that does not fit is an error that names all its wrong modules.
func Adapt(d tensor.Device, places map[string]Place, adapters []lora.Weighted) error {
	if err := Table(places).Check(adapters...); err != nil {
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
		stacked[places[module].In] = append(stacked[places[module].In], module)
	}
	for l, modules := range stacked { // one after the other, so that the host holds one of them
		w := make([]float32, l.W.N()*l.W.K())
		if err := d.Read(w, l.W); err != nil {
			return fmt.Errorf("adapter: %s: %w", modules[0], err)
		}
		for _, module := range modules {
			places[module].add(w, module, adapters)
		}
		adapted, err := d.Weight(tensor.Floats(w, l.W.N(), l.W.K()))
		if err != nil {
			return fmt.Errorf("adapter: %s: %w", modules[0], err)
		}
		l.W = adapted
	}
	return nil
}

// add adds what the adapters have for a module to its rows of w.
func (p Place) add(w []float32, module string, adapters []lora.Weighted) {
	sum := make([]float64, p.K)
	for row := range p.N {
		dst := w[(p.From+row)*p.K : (p.From+row+1)*p.K]
		for j, v := range dst {
			sum[j] = float64(v)
		}
		for _, a := range adapters {
			if low := a.Adapter.Product(module); low != nil {
				addRow(sum, low, row, a.Weight)
			}
		}
		for j, v := range sum {
			dst[j] = float32(v)
		}
	}
}

// addRow adds row of weight * scale * B A to sum.
func addRow(sum []float64, low *lora.Product, row int, weight float64) {
	for i := range low.R {
		c := weight * low.Scale * float64(low.B[row*low.R+i])
		for j, v := range low.A[i*low.K : (i+1)*low.K] {
			sum[j] += float64(c * float64(v)) // not fused: the same bits on every machine
		}
	}
}
