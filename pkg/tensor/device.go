package tensor

import (
	"context"
	"errors"
	"time"
)

// Device executes the operations of networks: it holds their weights, and runs their
// passes in sessions. Its methods may be called concurrently; tensortest is the suite
// that every device passes.
//
// A pass has the same bits whenever its arguments do, on one device: they do not depend
// on threads, nor on which other rows share a call.
type Device interface {
	// Name says what computes, for the record of an event, e.g. cpu/avx512.
	Name() string
	// Parallel is how many calls of Run are worth making at once, at least 1.
	Parallel() int
	// Run calls f with a session, waiting for a free one until ctx ends: then it returns
	// the cause of ctx. With wide, the operations of the session use all of the device when
	// nothing else does. What f took from the session is gone when Run returns. A panic of f
	// comes through.
	Run(ctx context.Context, wide bool, f func(Session) error) error

	// Weight puts projections of one input on the device, stacked: each is [n_i, K]. It
	// keeps their element type where the device computes with it. An error of this and the next
	// five is one of the device, such as its memory being full.
	Weight(parts ...Array) (Weight, error)
	// Read writes a weight back to dst [N, K], for those that derive others from it.
	Read(dst []float32, w Weight) error
	// Kernel puts a convolution kernel [out, in, kh, kw] on the device.
	Kernel(w Array) (Kernel, error)
	// Vector puts a bias, or the weights of a norm, on the device.
	Vector(a Array) (Vector, error)
	// Table puts a matrix [rows, cols] on the device, to Gather from.
	Table(a Array) (Matrix, error)
	// Cache is memory for factors that outlives sessions, zeros at first: sessions Scatter to
	// it, and attentions read it. Passes at the same time must not write what others use.
	Cache(rows, cols int) (Matrix, error)

	// WorkingBytes is the memory that idle sessions hold beside the weights.
	WorkingBytes() int
	// Close ends what the device runs. No session may be open.
	Close() error
}

// ErrDeviceLost is wrapped by the errors of a device that computes nothing any more.
var ErrDeviceLost = errors.New("the device is lost")

// Metered is a device with memory of its own.
type Metered interface {
	Usage() Usage
}

// Limited is a device with memory of its own that may be too small for a model.
type Limited interface {
	// Room is how many bytes weights and sessions can still take, and the size of an element
	// of weights of projections, tables and factors: 4, or 2 in bf16.
	Room() (bytes, factorBytes int, err error)
}

// Narrow is a device that can keep weights in a smaller type than it computes in. Products have
// the bits that they have otherwise: it pays for passes of few rows, which take as long as weights
// are read.
type Narrow interface {
	// NarrowWeight is Weight of parts that stay in the type of their file where that can be.
	NarrowWeight(parts ...Array) (Weight, error)
}

// Usage is where the memory of a device is, in bytes, and how long it worked.
type Usage struct {
	Used    int           // handed out: weights, and what a session has
	Idle    int           // kept for the next session
	Free    int           // that the device has left, for whoever asks; 0 where it does not say
	Total   int           // all that the device has
	Ceiling int           // of Used and Idle together; 0 is Total
	Blocks  int           // pieces handed out
	Busy    time.Duration // that sessions took
}

// Weight, Kernel and Vector are on a device, read-only, and belong to it alone.
type (
	// Weight is a matrix [N, K] of a projection.
	Weight interface {
		N() int
		K() int
		// Bytes is the memory it takes.
		Bytes() int
	}
	// Kernel is a convolution kernel.
	Kernel interface {
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

// Session is the operations of a pass and the memory for its matrices. One goroutine
// uses it, inside Run. Operations write to their first argument and may return before
// they are done; CopyOut waits for all of them. Shapes that do not fit are a programming
// error and panic with "tensor: ...".
type Session interface {
	// Block takes n elements with unspecified contents, until the end of the session.
	Block(n int) Block
	// Factors is Block for numbers that the products and attentions of the pass read: a device
	// that multiplies in a smaller type keeps them in it, rounded.
	Factors(n int) Block
	// CopyIn writes src, dense and row-major, to dst; CopyOut the other way.
	CopyIn(dst Matrix, src []float32)
	CopyOut(dst []float32, src Matrix)
	// CopyOutLater is CopyOut of what src is now, for what the pass does not read: dst may have it
	// only when Run returns, without an error. Other sessions can go on meanwhile.
	CopyOutLater(dst []float32, src Matrix)

	// Linear computes dst [M, N] = x [M, K] w^T with an epilogue. dst must not overlap x;
	// the residual may be dst itself.
	Linear(dst, x Matrix, w Weight, e Epilogue)
	// Attention is scaled dot-product attention, per sequence and head:
	// q [Lq, Heads*D], k [Lk, KVHeads*D], v [Lk, KVHeads*Dv], dst [Lq, Heads*Dv]. dst may
	// be q; it must not overlap k and v.
	Attention(dst, q, k, v Matrix, a Attention)
	// LayerNormModulate computes, per row i, norm(x[i]) * (1 + scale[g]) + shift[g] with
	// g = group[i] (nil: row 0): mean 0 and variance 1 over the row, plus eps.
	LayerNormModulate(dst, x, scale, shift Matrix, group []int32, eps float32)
	// RMSNorm divides groups of w.Len() columns by the root of their mean square plus eps
	// and multiplies by w. dst may be x.
	RMSNorm(dst, x Matrix, w Vector, eps float32)
	// L2Norm computes act(w * sqrt(C) * x / max(|x|, eps)) per row of C columns. dst may be x.
	L2Norm(dst, x Matrix, w Vector, eps float32, act Activation)
	// RMSNormRopePairs is RMSNorm, then RopePairs, of heads of w.Len() columns.
	RMSNormRopePairs(dst, x Matrix, w Vector, eps float32, cos, sin Matrix, rows []int32)
	// RopePairs rotates adjacent columns 2j and 2j+1 of each head by the angle whose cos and
	// sin are in row rows[i] (nil: i) of the tables [P, D/2]; RopeHalves columns j and
	// j + D/2. dst may be x.
	RopePairs(dst, x, cos, sin Matrix, rows []int32)
	RopeHalves(dst, x, cos, sin Matrix, rows []int32)
	// SiLUMul computes SiLU(x) * y, the gate of a SwiGLU.
	SiLUMul(dst, x, y Matrix)
	// Gather copies rows ids of a table.
	Gather(dst, table Matrix, ids []int32)
	// Scatter copies row i of x to row rows[i] of dst; no two rows are the same.
	Scatter(dst, x Matrix, rows []int32)
	// Conv2D convolves with zeros around x.
	Conv2D(dst, x Image, w Kernel, c Conv, e Epilogue)
	// Upsample2 doubles height and width, each pixel four times.
	Upsample2(dst, x Image)
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
	Residual Matrix  // [M, N]; it may be dst
	Group    []int32 // [M], the Gate row of each row; nil: row 0 for all
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

	// Keys, with Sequences, lists the rows of k and v that each sequence sees, in order, where
	// they are not those of its queries: a cache, whose rows are those of k, Lk of them seen. Several
	// sequences may see a row.
	Keys [][]int32
}

// Conv is how a convolution moves: Stride in both directions (0 means 1) and rows and
// columns of zeros around the input.
type Conv struct {
	Stride                   int
	Top, Left, Bottom, Right int
}

// SamePad returns the padding that keeps the size with a k x k kernel, k odd, stride 1.
func SamePad(k int) Conv {
	return Conv{Stride: 1, Top: k / 2, Left: k / 2, Bottom: k / 2, Right: k / 2}
}

// OutSize returns height and width of the output of a kh x kw kernel over h x w.
func (c Conv) OutSize(kh, kw, h, w int) (oh, ow int) {
	s := max(1, c.Stride)
	return (h+c.Top+c.Bottom-kh)/s + 1, (w+c.Left+c.Right-kw)/s + 1
}
