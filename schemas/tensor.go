package schemas

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
