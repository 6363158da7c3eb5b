package schemas

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Tensor is a dense row-major little-endian array. Exactly one of Data, Ref and
// Parts carries the elements.
type Tensor struct {
	// DType is the element type, named as in safetensors: F32, F16, BF16, U8, ...
	DType string `msgpack:"dtype" enum:"DTypes"`
	// Shape is outermost first; at most MaxTensorDims dimensions.
	Shape []int64 `msgpack:"shape" size:"0..MaxTensorDims" range:"1..MaxTensorBytes"`
	// Data is the elements, product(Shape) * sizeof(DType) bytes.
	Data []byte `msgpack:"data,omitempty"`
	// Ref points to the elements in the object store.
	Ref *Ref `msgpack:"ref,omitempty"`
	// Parts says that the elements travel as numbered parts beside the event.
	Parts *Parts `msgpack:"parts,omitempty"`
}

// Ref names a content-addressed blob in the object store.
type Ref struct {
	// Bucket is the object store bucket, normally BlobBucket.
	Bucket string `msgpack:"bucket" form:"token" digest:"-"`
	// Digest is the sha-256 of the bytes in lower-case hex; it is also the object's name.
	Digest string `msgpack:"digest" form:"sha256"`
	// Size is the length in bytes.
	Size int64 `msgpack:"size" range:"1..MaxBlobBytes" digest:"-"`
}

// Parts describes elements that were too large for one message: Count messages
// on the event's own subject followed by ".<part>", part = First .. First+Count-1,
// each at most MaxPartBytes, to be joined in that order.
type Parts struct {
	First int64 `msgpack:"first" range:"0..2147483647"`
	Count int64 `msgpack:"count" range:"1..MaxParts"`
	// Size is the length of the joined bytes.
	Size int64 `msgpack:"size" range:"1..MaxTensorBytes"`
	// Digest is blake3: and the blake3 of the joined bytes in lower-case hex; in older events it is their sha-256.
	Digest string `msgpack:"digest" form:"digest"`
}

// IndexedTensor is latents at one place of a trajectory: Index i is the state
// before step i; Index T (the number of steps) is the final latents.
type IndexedTensor struct {
	Index  int64  `msgpack:"index" range:"0..MaxSteps"`
	Tensor Tensor `msgpack:"tensor"`
}

// NamedTensor is one debug tensor of a step: noise, mean, std or model_output.
type NamedTensor struct {
	Name   string `msgpack:"name" size:"1..MaxName"`
	Tensor Tensor `msgpack:"tensor"`
}

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
