// Package tensor is the interface between networks and the devices that compute them. A
// [Device] holds weights and runs passes; a [Session] is one pass, with its operations and
// its memory; [Matrix] and [Image] are views of memory that only the device can read.
// Networks are written once, with these types.
//
// A factor is a matrix that products and attentions multiply; some devices store factors in
// bf16. An epilogue is what happens to a product before it is stored, such as adding a bias.
//
// Package cpu is the device that every machine has. Package reference is a slow and simple
// device in float64, which others are compared with. Package tensortest is the test suite
// that every device passes.
//
// [DType] is an element type of files and events, with conversions.
package tensor

import (
	"context"
	"errors"
	"time"
)

// Device holds the weights of networks and runs their passes in sessions. Its methods are
// safe for concurrent use. Every device passes the tests of package tensortest.
//
// On one device, a pass with equal arguments gives equal bits: they depend neither on
// threads, nor on the other rows of a call.
type Device interface {
	// Name returns what computes, as events record it, e.g. cpu/avx512.
	Name() string
	// Parallel returns how many concurrent calls of Run make work faster, at least 1.
	Parallel() int
	// Run waits for a free session and calls f with it. If ctx ends before, it returns the cause of ctx. With wide,
	// the operations of the session use all of the device when nothing else runs. Memory of the session is invalid
	// when Run returns. A panic of f reaches the caller.
	Run(ctx context.Context, wide bool, f func(Session) error) error

	// Weight puts projections of one input on the device, stacked: each is [n_i, K]. It keeps their element type if
	// the device computes with it. An error of this method and of the next five is one of the device, such as full
	// memory.
	Weight(parts ...Array) (Weight, error)
	// Read writes a weight back to dst [N, K], so that callers can derive other weights from it.
	Read(dst []float32, w Weight) error
	// Filter puts the filter of a convolution [out, in, kh, kw] on the device.
	Filter(w Array) (Filter, error)
	// Vector puts a bias, or the weights of a norm, on the device.
	Vector(a Array) (Vector, error)
	// Table puts a matrix [rows, cols] on the device, for Gather.
	Table(a Array) (Matrix, error)
	// Cache allocates memory for factors that outlives sessions, filled with zeros. Sessions write it with Scatter,
	// and attentions read it. Concurrent passes must not write rows that others use.
	Cache(rows, cols int) (Matrix, error)

	// WorkingBytes returns the memory that idle sessions hold, without the weights.
	WorkingBytes() int
	// Close stops the device. No session may be open.
	Close() error
}

// ErrDeviceLost is wrapped by the errors of a device that failed and cannot compute any more.
var ErrDeviceLost = errors.New("the device is lost")

// Metered is a device with memory of its own.
type Metered interface {
	Usage() Usage
}

// Limited is a device with memory of its own that may be too small for a model.
type Limited interface {
	// FreeSpace returns the memory in bytes that is left for weights and sessions, and the size in bytes of an
	// element of projections, tables and factors: 4, or 2 in bf16.
	FreeSpace() (bytes, factorBytes int, err error)
}

// Factored is a device that may multiply in another element type than float32.
type Factored interface {
	// Factors is the type that both factors of a product have.
	Factors() DType
}

// FewRowsPacker is a device that can keep weights in a form for products of few rows, which take as long as reading the
// weights does: a language model that draws tokens has only these.
type FewRowsPacker interface {
	// WeightForFewRows is Device.Weight; products give the same bits.
	WeightForFewRows(parts ...Array) (Weight, error)
}

// LowRankAdder is a device that computes with a weight and low-rank products beside it. So a version of the weights
// needs little memory of its own and is ready at once, and a change that is too small for the weight's type counts.
type LowRankAdder interface {
	// AddLowRank returns w plus the products, in the memory of w and of the products: Linear computes
	// x w^T + (x A^T) B^T. w keeps its values. Products of different rows only: no row may be in two of them. What it
	// returns cannot be read.
	AddLowRank(w Weight, products []LowRank) (Weight, error)
}

// RowsOf says which weight multiplies the rows of a product up to To, from the end of the one before.
type RowsOf struct {
	W  Weight
	To int
}

// RowsMultiplier is a session of a LowRankAdder.
type RowsMultiplier interface {
	// LinearOf is Linear with weights of some rows each, with the bits that each gives alone. It multiplies by a weight
	// once for all rows that have other products beside it.
	LinearOf(dst, x Matrix, rows []RowsOf, e Epilogue)
}

// LowRank is what is added to rows From to From+N-1 of a weight with K columns: B A, with B [N, R] and A [R, K].
type LowRank struct {
	A, B          []float32
	From, N, R, K int
}

// Usage says how the memory of a device is used, in bytes, and how long it worked.
type Usage struct {
	Used    int           // by weights and sessions
	Idle    int           // kept for the next session
	Free    int           // left on the device, for all processes; 0 if unknown
	Total   int           // all that the device has
	Ceiling int           // of Used and Idle together; 0 is Total
	Blocks  int           // pieces in use
	Busy    time.Duration // that sessions took
}

// Weight, Filter and Vector are read-only data on a device. Only that device can use them.
type (
	// Weight is a matrix [N, K] of a projection.
	Weight interface {
		N() int
		K() int
		// Bytes is its memory.
		Bytes() int
	}
	// Filter is the filter of a convolution, its weights.
	Filter interface {
		// Size is height and width.
		Size() (kh, kw int)
		// Channels are those of the input and of the output.
		Channels() (in, out int)
		Bytes() int
	}
	// Vector is a row of numbers; nil is the absent one.
	Vector interface {
		Len() int
		Bytes() int
	}
)

// Session is one pass: its operations and the memory for its matrices. It is for one
// goroutine, inside Run. Operations write to their first argument and may return before
// they are done; CopyOut waits for all of them. Shapes that do not fit are a programming
// error and panic with "tensor: ...".
type Session interface {
	// Block allocates n elements with unspecified contents, until the end of the session.
	Block(n int) Block
	// Factors is Block for factors, which products and attentions of the pass read: a device that multiplies in a
	// smaller type stores them in that type, rounded.
	Factors(n int) Block
	// CopyIn writes src, dense and row-major, to dst; CopyOut the other way.
	CopyIn(dst Matrix, src []float32)
	CopyOut(dst []float32, src Matrix)
	// CopyOutLater is CopyOut for results that the pass does not read: it copies the current src, but dst is set
	// only when Run returns without an error. Other sessions can run meanwhile.
	CopyOutLater(dst []float32, src Matrix)

	// Linear computes dst [M, N] = x [M, K] w^T with an epilogue. dst must not overlap x;
	// the residual may alias dst.
	Linear(dst, x Matrix, w Weight, e Epilogue)
	// Attention is scaled dot-product attention, per sequence and head:
	// q [Lq, Heads*D], k [Lk, KVHeads*D], v [Lk, KVHeads*Dv], dst [Lq, Heads*Dv]. dst may
	// alias q; it must not overlap k and v.
	Attention(dst, q, k, v Matrix, a Attention)
	// LayerNormModulate computes, per row i, norm(x[i]) * (1 + scale[g]) + shift[g] with
	// g = group[i] (nil: row 0): mean 0 and variance 1 over the row, plus eps.
	LayerNormModulate(dst, x, scale, shift Matrix, group []int32, eps float32)
	// RMSNorm divides groups of w.Len() columns by the root of their mean square plus eps
	// and multiplies by w. dst may alias x.
	RMSNorm(dst, x Matrix, w Vector, eps float32)
	// L2Norm computes act(w * sqrt(C) * x / max(|x|, eps)) per row of C columns. dst may alias x.
	L2Norm(dst, x Matrix, w Vector, eps float32, act Activation)
	// RMSNormRopePairs is RMSNorm, then RopePairs, of heads of w.Len() columns.
	RMSNormRopePairs(dst, x Matrix, w Vector, eps float32, cos, sin Matrix, rows []int32)
	// RopePairs rotates adjacent columns 2j and 2j+1 of each head by the angle whose cos and
	// sin are in row rows[i] (nil: i) of the tables [P, D/2]; RopeHalves columns j and
	// j + D/2. dst may alias x.
	RopePairs(dst, x, cos, sin Matrix, rows []int32)
	RopeHalves(dst, x, cos, sin Matrix, rows []int32)
	// SiLUMul computes SiLU(x) * y, the gate of a SwiGLU.
	SiLUMul(dst, x, y Matrix)
	// Gather copies rows ids of a table.
	Gather(dst, table Matrix, ids []int32)
	// Scatter copies row i of x to row rows[i] of dst; no two rows are the same.
	Scatter(dst, x Matrix, rows []int32)
	// Conv2D convolves with zeros around x.
	Conv2D(dst, x Image, w Filter, c Conv, e Epilogue)
	// Upsample2 doubles height and width, each pixel four times.
	Upsample2(dst, x Image)
}

// Doubler is a session that convolves a doubled image without making it.
type Doubler interface {
	// DoubledConv2D is Upsample2 of x, then Conv2D of a 3x3 filter with SamePad(3): other bits, by rounding alone.
	DoubledConv2D(dst, x Image, w Filter, e Epilogue)
}

// Activation is a function applied to each element.
type Activation int

// Activations.
const (
	Identity Activation = iota
	SiLU                // x / (1 + e^-x)
	GELU                // x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
)

// Epilogue is what Linear and Conv2D do with a product y before storing it:
//
//	dst[i,j] = Residual[i,j] + Gate[g,j] * Act(y[i,j] + Bias[j]), g = Group[i].
//
// Every part is optional.
type Epilogue struct {
	Bias     Vector // [N]
	Act      Activation
	Gate     Matrix  // [groups, N]
	Residual Matrix  // [M, N]; it may alias dst
	Group    []int32 // [M], the Gate row of each row; nil: row 0 for all
}

// Rows returns the epilogue of rows from..to-1.
func (e Epilogue) Rows(from, to int) Epilogue {
	if !e.Residual.IsZero() {
		e.Residual = e.Residual.SliceRows(from, to)
	}
	if e.Group != nil {
		e.Group = e.Group[from:to]
	}
	return e
}

// Attention describes scaled dot-product attention. A head is a group of adjacent
// columns: head h of q is columns h*D to (h+1)*D, and head h reads key and value
// head h*KVHeads/Heads.
type Attention struct {
	Heads   int
	KVHeads int     // divides Heads; 0 means Heads
	Scale   float32 // of the scores; 0 means 1/sqrt(D)

	// Causal lets the query at position i of Lq see the keys up to i + Lk - Lq.
	Causal bool

	// Mask [Lk] leaves out the keys (rows of k and v) that are false; nil keeps all.
	// The bits are those of a call without these keys. A query that sees no key
	// gives 0.
	Mask []bool

	// Sequences splits the call in independent sequences, each the list of its rows
	// in q, k, v and dst, in order; rows in no sequence are left alone. Rows of one
	// sequence may lie apart, such as text and image rows of a joint sequence. nil is
	// one sequence of all rows.
	Sequences [][]int32

	// Keys, with Sequences, lists the rows of k and v that each sequence sees, in order, if they
	// are not the rows of its queries: rows of a cache. Lk is then the number of these rows.
	// Several sequences may see the same row.
	Keys [][]int32
}

// Conv is the geometry of a convolution: the stride in both directions (0 means 1), and how
// many rows and columns of zeros are around the input.
type Conv struct {
	Stride                   int
	Top, Left, Bottom, Right int
}

// SamePad returns the padding that keeps the size with a k x k filter, k odd, stride 1.
func SamePad(k int) Conv {
	return Conv{Stride: 1, Top: k / 2, Left: k / 2, Bottom: k / 2, Right: k / 2}
}

// OutSize returns height and width of the output of a kh x kw filter over h x w.
func (c Conv) OutSize(kh, kw, h, w int) (oh, ow int) {
	s := max(1, c.Stride)
	return (h+c.Top+c.Bottom-kh)/s + 1, (w+c.Left+c.Right-kw)/s + 1
}
