package cuda

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"runtime"

	"github.com/meander-rl/meander/pkg/models/tensor"
	"github.com/meander-rl/meander/pkg/models/tensor/cuda/driver"
)

// array is numbers on the device, row by row: a weight [n, k], a kernel [out, kh, kw, in],
// a vector, a table. Its memory is released when it is no longer referenced.
type array struct {
	n, k   int // out, kh*kw*in of a kernel
	kh, kw int
	in     int
	dtype  tensor.DType // F32 or BF16
	stride int          // of rows, elements
	at     driver.Pointer
	half   *array // of a bias, once a session has needed it in bf16; sessions come one after another
}

func (a *array) N() int                  { return a.n }
func (a *array) K() int                  { return a.k }
func (a *array) Len() int                { return a.n * a.k }
func (a *array) Size() (kh, kw int)      { return a.kh, a.kw }
func (a *array) Channels() (in, out int) { return a.in, a.n }
func (a *array) Bytes() int              { return a.dtype.Size() * a.n * a.stride }

// padded is the stride of rows in bf16: kernels copy 8 elements at a time.
func padded(cols int) int { return (cols + 7) / 8 * 8 }

// uploadBytes is what is copied to the device at once. An upload takes no more host memory
// than five times that, however large the weight: what it reads, as float32 and in the
// device's type. Rows are not split; none is longer than that.
const uploadBytes = 4 << 20

// putArrays puts arrays of k columns on the device, stacked, in type dtype, when a model is opened.
// The memory is released when the result is no longer referenced. It fails when the GPU has no more
// memory or is lost.
func (d *Device) putArrays(k int, dtype tensor.DType, parts ...tensor.Array) (*array, error) {
	a := &array{k: k, dtype: dtype, stride: k}
	if dtype == tensor.BF16 {
		a.stride = padded(k)
	}
	for _, p := range parts {
		if k > 0 {
			a.n += p.Len() / k
		}
	}
	if a.Bytes() == 0 {
		return a, nil
	}
	err := d.withContext(func() (err error) {
		if err = d.allocateArray(a); err != nil {
			return err
		}
		at := a.at
		for _, p := range parts {
			if err := d.upload(at, a, p); err != nil {
				return d.deviceError(err)
			}
			at += driver.Pointer(p.Len() / k * a.stride * dtype.Size())
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("put %s on the device: %w", mib(a.Bytes()), err)
	}
	return a, nil
}

// allocateArray gives an array its memory, until it is no longer referenced. The context must be bound.
func (d *Device) allocateArray(a *array) (err error) {
	if a.at, err = d.pool.allocateExactly((a.Bytes() + 255) / 256 * 256); err != nil {
		return d.deviceError(err)
	}
	runtime.AddCleanup(a, d.pool.release, a.at)
	return nil
}

// adapted is a weight w and the product of two factors beside it: x (w + up down)^T is x w^T + (x down^T) up^T.
type adapted struct {
	*array
	down, up *array // [R, K] and [N, R]
}

func (a *adapted) Bytes() int { return a.array.Bytes() + a.down.Bytes() + a.up.Bytes() }

// AddLowRank implements tensor.LowRankAdder. The products become one: their ranks one after the other, with zeros in
// the rows that a product does not change.
func (d *Device) AddLowRank(w tensor.Weight, products []tensor.LowRank) (tensor.Weight, error) {
	base, rank := w.(*array), 0
	for _, p := range products {
		rank += p.R
	}
	var down []float32
	up := make([]float32, base.n*rank)
	at := 0
	for _, p := range products {
		down = append(down, p.A...)
		for i := range p.N {
			copy(up[(p.From+i)*rank+at:], p.B[i*p.R:(i+1)*p.R])
		}
		at += p.R
	}
	a := &adapted{array: base}
	var err error
	if a.down, err = d.putArrays(base.k, d.Factors(), tensor.Floats(down, rank, base.k)); err != nil {
		return nil, err
	}
	if a.up, err = d.putArrays(rank, d.Factors(), tensor.Floats(up, base.n, rank)); err != nil {
		return nil, err
	}
	return a, nil
}

// upload copies the rows of p to the device memory at that address, in the type and with the stride
// of a, a piece at a time, so that a large weight needs little host memory. An error of the driver
// ends it.
func (d *Device) upload(at driver.Pointer, a *array, p tensor.Array) error {
	d.uploading.Lock()
	defer d.uploading.Unlock()
	size := a.dtype.Size()
	rows, row := p.Len()/a.k, a.stride*size
	most := max(1, uploadBytes/row)
	for from := 0; from < rows; from += most {
		n := min(most, rows-from)
		data := p.Data[from*a.k*p.DType.Size() : (from+n)*a.k*p.DType.Size()]
		if p.DType != a.dtype || a.stride != a.k {
			data = d.convert(a, p.DType, data, n)
		} else {
			// The driver must not read a mapped file: where that is cut off, the process would end.
			d.encoded = append(d.encoded[:0], data...)
			data = d.encoded
		}
		if err := d.driver.CopyIn(at+driver.Pointer(from*row), data); err != nil {
			return err
		}
	}
	return nil
}

// convert returns rows of data (type from, a.k columns) in the type and with the stride of a, zeros
// in the gaps, for upload. The result is in memory that the next call takes again. Data of another
// length panics.
func (d *Device) convert(a *array, from tensor.DType, data []byte, rows int) []byte {
	if n := rows * a.k; cap(d.decoded) < n {
		d.decoded = make([]float32, n)
	}
	x := d.decoded[:rows*a.k]
	if err := from.DecodeFloats(x, data); err != nil {
		panic("tensor: " + err.Error())
	}
	if n := rows * a.stride * a.dtype.Size(); cap(d.encoded) < n {
		d.encoded = make([]byte, 0, n)
	}
	b, gap := d.encoded[:0], (a.stride-a.k)*a.dtype.Size()
	for i := range rows {
		b = a.dtype.AppendFloats(b, x[i*a.k:(i+1)*a.k])
		for range gap {
			b = append(b, 0)
		}
	}
	return b
}

// FreeSpace returns the memory left for weights and sessions, and the size of a factor, both in
// bytes: what a model is checked against before it is opened. A lost device is an error.
func (d *Device) FreeSpace() (bytes, factorBytes int, err error) {
	err = d.withContext(func() error {
		free, _, err := d.driver.Memory()
		if err != nil {
			return d.deviceError(err)
		}
		u := d.pool.now()
		if bytes = free + u.Idle; u.Ceiling > 0 {
			bytes = min(bytes, u.Ceiling-u.Used)
		}
		return nil
	})
	return bytes, d.Factors().Size(), err
}

// Weight implements tensor.Device: it stacks the parts [n_i, K] on the GPU in the type of factors.
// Parts of another shape panic; no memory is an error.
func (d *Device) Weight(parts ...tensor.Array) (tensor.Weight, error) {
	k := parts[0].Shape[1]
	for _, p := range parts {
		if len(p.Shape) != 2 || p.Shape[1] != k {
			panic(fmt.Sprintf("tensor: weight of shape %v beside %v", p.Shape, parts[0].Shape))
		}
	}
	a, err := d.putArrays(k, d.Factors(), parts...)
	if err != nil {
		return nil, err
	}
	return a, nil
}

// Factors implements tensor.Factored.
func (d *Device) Factors() tensor.DType {
	if d.bf16 {
		return tensor.BF16
	}
	return tensor.F32
}

// Read implements tensor.Device: it copies a weight [N, K] back to dst. Another length panics; a lost device is an
// error.
func (d *Device) Read(dst []float32, w tensor.Weight) error {
	a, ok := w.(*array)
	if !ok {
		return errors.New("read a weight with low-rank products: the device has no sum of them")
	}
	if len(dst) != a.Len() {
		panic(fmt.Sprintf("tensor: read %d x %d to %d elements", a.n, a.k, len(dst)))
	}
	b := make([]byte, a.Bytes())
	if len(b) == 0 {
		return nil
	}
	err := d.withContext(func() error {
		if err := d.driver.CopyOut(b, a.at); err != nil {
			return d.deviceError(err)
		}
		return nil
	})
	if err != nil {
		return err
	}
	row := a.stride * a.dtype.Size()
	for i := range a.n {
		if err := a.dtype.DecodeFloats(dst[i*a.k:(i+1)*a.k], b[i*row:i*row+a.k*a.dtype.Size()]); err != nil {
			return err
		}
	}
	return nil
}

func decode(dst []float32, b []byte) {
	for i := range dst {
		dst[i] = math.Float32frombits(binary.LittleEndian.Uint32(b[4*i:]))
	}
}

// Filter implements tensor.Device for a convolution w [out, in, kh, kw]. It moves the channels of
// the input last: they are adjacent in an image. Tensor cores take them eight at a time; other
// numbers stay float32. No memory is an error.
func (d *Device) Filter(w tensor.Array) (tensor.Filter, error) {
	if len(w.Shape) != 4 {
		panic(fmt.Sprintf("tensor: convolution filter of shape %v", w.Shape))
	}
	out, in, kh, kw := w.Shape[0], w.Shape[1], w.Shape[2], w.Shape[3]
	dtype := tensor.F32
	if in%8 == 0 {
		dtype = d.Factors()
	}
	x, y := w.Decode(), make([]float32, w.Len())
	for o := range out {
		for c := range in {
			for p := range kh * kw {
				y[(o*kh*kw+p)*in+c] = x[(o*in+c)*kh*kw+p]
			}
		}
	}
	a, err := d.putArrays(kh*kw*in, dtype, tensor.Floats(y, w.Len()))
	if err != nil {
		return nil, err
	}
	a.kh, a.kw, a.in = kh, kw, in
	return a, nil
}

// Vector keeps the numbers as float32.
func (d *Device) Vector(a tensor.Array) (tensor.Vector, error) {
	v, err := d.putArrays(a.Len(), tensor.F32, a)
	if err != nil {
		return nil, err
	}
	return v, nil
}

// Table implements tensor.Device: it keeps a matrix, such as an embedding, as float32, or in bf16
// where the file does and factors are. Another shape panics; no memory is an error.
func (d *Device) Table(a tensor.Array) (tensor.Matrix, error) {
	if len(a.Shape) != 2 {
		panic(fmt.Sprintf("tensor: table of shape %v", a.Shape))
	}
	dtype := tensor.F32
	if d.bf16 && a.DType == tensor.BF16 {
		dtype = tensor.BF16
	}
	return d.matrix(a.Shape[1], dtype, a)
}

// matrix puts rows of cols numbers on the device in a type.
func (d *Device) matrix(cols int, dtype tensor.DType, parts ...tensor.Array) (tensor.Matrix, error) {
	t, err := d.putArrays(cols, dtype, parts...)
	if err != nil {
		return tensor.Matrix{}, err
	}
	m := &memory{at: t.at, len: t.n * t.stride, dtype: dtype, owner: t}
	return tensor.Matrix{Memory: m, Rows: t.n, Cols: cols, Stride: t.stride}, nil
}

// Cache implements tensor.Device: memory for keys and values that outlives sessions, all zeros, in
// the type of factors. No memory is an error.
func (d *Device) Cache(rows, cols int) (tensor.Matrix, error) {
	dtype := d.Factors()
	step := max(1, uploadBytes/(cols*dtype.Size()))
	zeros := make([]byte, min(rows, step)*cols*dtype.Size())
	var parts []tensor.Array
	for from := 0; from < rows; from += step {
		n := min(step, rows-from)
		parts = append(parts, tensor.Array{DType: dtype, Shape: []int{n, cols}, Data: zeros[:n*cols*dtype.Size()]})
	}
	return d.matrix(cols, dtype, parts...)
}
