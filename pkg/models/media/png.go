package media

import (
	"bytes"
	"compress/zlib"
	"encoding/binary"
	"errors"
	"fmt"
	"image"
	"sync"
)

const (
	// lead is the bytes before a row that is filtered, which count as 0, and vector what the filter takes at once.
	lead, vector = 4, 32
	paethFilter  = 4 // before each row that is filtered by Paeth
)

// EncodePNG returns an image as a PNG file. It costs a third of what image/png takes at its fastest, and the file is
// mostly smaller: every row is filtered by Paeth, which wins nearly always on what models make, and the differences
// are Huffman-coded alone, as matches save nothing there. Flat images, of which most differences are 0, have matches.
func EncodePNG(img *image.NRGBA) ([]byte, error) {
	size := img.Rect.Size()
	if size.X < 1 || size.Y < 1 {
		return nil, errors.New("encode png: no pixels")
	}
	bytesPerPixel, colourType := 3, byte(2) // RGB
	if !img.Opaque() {
		bytesPerPixel, colourType = 4, 6
	}
	header := binary.BigEndian.AppendUint32(nil, uint32(size.X))
	header = binary.BigEndian.AppendUint32(header, uint32(size.Y))
	pixels, err := deflate(filterRows(img, bytesPerPixel))
	if err != nil {
		return nil, fmt.Errorf("encode png: %w", err)
	}
	file := append(make([]byte, 0, len(pixels)+64), signature...)
	file = appendChunk(file, "IHDR", append(header, 8, colourType, 0, 0, 0))
	return appendChunk(appendChunk(file, "IDAT", pixels), "IEND"), nil
}

// filterRows returns the rows of an image, each after its filter.
func filterRows(img *image.NRGBA, bytesPerPixel int) []byte {
	size := img.Rect.Size()
	n := bytesPerPixel * size.X
	whole := (n + vector - 1) / vector * vector // of a row, which the next one overwrites
	above, row := make([]byte, lead+whole), make([]byte, lead+whole)
	out := make([]byte, (1+n)*size.Y+vector)
	for y := range size.Y {
		pix := img.Pix[y*img.Stride:][:4*size.X]
		if bytesPerPixel == 4 {
			copy(row[lead:], pix)
		} else {
			dropAlpha(row[lead:], pix)
		}
		to := out[y*(1+n):]
		to[0] = paethFilter
		left := lead - bytesPerPixel
		paeth(to[1:1+whole], row[lead:], row[left:], above[lead:], above[left:])
		above, row = row, above
	}
	return out[:(1+n)*size.Y]
}

// dropAlpha copies red, green and blue of pixels, 4 bytes each, to dst, which has 3 bytes for each.
func dropAlpha(dst, pix []byte) {
	for len(pix) >= 16 && len(dst) >= 12 {
		a, b := binary.LittleEndian.Uint64(pix), binary.LittleEndian.Uint64(pix[8:])
		a = a&0xffffff | a>>32<<40>>16
		b = b&0xffffff | b>>32<<40>>16
		binary.LittleEndian.PutUint64(dst, a|b<<48)
		binary.LittleEndian.PutUint32(dst[8:], uint32(b>>16))
		dst, pix = dst[12:], pix[16:]
	}
	for ; len(pix) >= 4; dst, pix = dst[3:], pix[4:] {
		copy(dst[:3], pix)
	}
}

// goPaeth sets dst to x less the nearest to a + b - c of a (left), b (above) and c (above at the left).
func goPaeth(dst, x, a, b, c []byte) {
	x, a, b, c = x[:len(dst)], a[:len(dst)], b[:len(dst)], c[:len(dst)]
	for i := range dst {
		toA, toB := int(b[i])-int(c[i]), int(a[i])-int(c[i])
		toC := max(toA+toB, -toA-toB)
		toA, toB = max(toA, -toA), max(toB, -toB)
		nearest := a[i]
		if toA > min(toB, toC) {
			nearest = b[i]
			if toB > toC {
				nearest = c[i]
			}
		}
		dst[i] = x[i] - nearest
	}
}

// deflaters are writers that were used before, by their level: a new one takes most of a megabyte.
var deflaters = map[int]*sync.Pool{zlib.HuffmanOnly: {}, zlib.BestSpeed: {}}

// deflate compresses filtered rows, with matches if more than three quarters of them are 0.
func deflate(rows []byte) ([]byte, error) {
	level := zlib.HuffmanOnly
	if zeros := bytes.Count(rows, []byte{0}); zeros > len(rows)/4*3 {
		level = zlib.BestSpeed
	}
	var out bytes.Buffer
	w, used := deflaters[level].Get().(*zlib.Writer)
	if used {
		w.Reset(&out)
	} else {
		var err error
		if w, err = zlib.NewWriterLevel(&out, level); err != nil {
			return nil, err
		}
	}
	_, err := w.Write(rows)
	err = errors.Join(err, w.Close())
	deflaters[level].Put(w)
	return out.Bytes(), err
}
