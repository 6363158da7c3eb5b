package schemas

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// ElementCount returns the product of the shape; false if a dimension is not positive,
// there are more than MaxTensorDims, or the product exceeds MaxTensorBytes.
func (t *Tensor) ElementCount() (int64, bool) {
	if len(t.Shape) > MaxTensorDims {
		return 0, false
	}
	n := int64(1)
	for _, d := range t.Shape {
		if d < 1 || d > MaxTensorBytes/n {
			return 0, false
		}
		n *= d
	}
	return n, true
}

// ByteSize returns the size of the elements in bytes; false if dtype or shape are not legal.
func (t *Tensor) ByteSize() (int64, bool) {
	n, ok := t.ElementCount()
	size, known := DTypeSize(t.DType)
	if !ok || !known || n > MaxTensorBytes/size {
		return 0, false
	}
	return n * size, true
}

// checkRules checks that exactly one of data, ref and parts is given, with the size that dtype and shape require.
func (t *Tensor) checkRules(f *faults) {
	if _, ok := t.ElementCount(); !ok && len(t.Shape) <= MaxTensorDims &&
		!slices.ContainsFunc(t.Shape, func(d int64) bool { return d < 1 || d > MaxTensorBytes }) {
		f.add("shape", fmt.Sprint(t.Shape), fmt.Sprintf("must be of %d bytes at most", MaxTensorBytes))
	}
	var carriers []string
	if t.Data != nil {
		carriers = append(carriers, "data")
	}
	if t.Ref != nil {
		carriers = append(carriers, "ref")
	}
	if t.Parts != nil {
		carriers = append(carriers, "parts")
	}
	if len(carriers) != 1 {
		came := "none"
		if len(carriers) > 0 {
			came = strings.Join(carriers, " and ")
		}
		f.add("data", came, "must be exactly one of data, ref and parts")
		return
	}
	size, ok := t.ByteSize()
	if !ok {
		return // reported above
	}
	has, field := int64(len(t.Data)), "data"
	if t.Ref != nil {
		has, field = t.Ref.Size, "ref.size"
	} else if t.Parts != nil {
		has, field = t.Parts.Size, "parts.size"
	}
	if has != size {
		f.add(field, strconv.FormatInt(has, 10)+" bytes", fmt.Sprintf("must be %d, the size of %s %v", size, t.DType,
			t.Shape))
	}
}

func (p *Parts) checkRules(f *faults) {
	// Every part has at least one byte and at most MaxPartBytes.
	if p.Count >= 1 && p.Count <= MaxParts && p.Size >= 1 && p.Size <= MaxTensorBytes {
		f.checkWithin("size", p.Size, p.Count, p.Count*MaxPartBytes)
	}
}
