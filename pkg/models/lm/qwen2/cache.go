package qwen2

import (
	"context"
	"sync"

	"github.com/meander-rl/meander/pkg/models/lm"
	"github.com/meander-rl/meander/pkg/models/tensor"
)

// cache holds keys and values of all sequences, one row per token. It grows as pages are allocated.
type cache struct {
	pages  *lm.Pages
	device tensor.Device
	cols   int

	mu     *sync.RWMutex // of all caches of a checkpoint, read-locked while passes use rows
	matrix tensor.Matrix
}

// init sets the device, the lock, the columns of a row, and the most bytes of the cache.
func (c *cache) init(d tensor.Device, mu *sync.RWMutex, cols, bytes int) {
	c.device, c.mu, c.cols = d, mu, cols
	c.pages = lm.NewPages(bytes / (4 * cols))
}

// leastRows is the number of rows of a new cache.
const leastRows = 1024

// growToPages grows the memory of keys and values to the rows of all pages, and keeps its contents.
// Forward calls it before each pass, and passes wait while it copies. No memory on the device is an
// error; the cache then stays as it is.
func (c *cache) growToPages(ctx context.Context) error {
	need := c.pages.Rows()
	c.mu.RLock()
	enough := need <= c.matrix.Rows
	c.mu.RUnlock()
	if enough {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	old := c.matrix
	if need <= old.Rows {
		return nil
	}
	grown, err := c.device.Cache(min(max(need, 2*old.Rows, leastRows), max(need, c.pages.Tokens())), c.cols)
	if err != nil {
		return err
	}
	if old.Rows > 0 {
		rows := make([]int32, old.Rows)
		for i := range rows {
			rows[i] = int32(i)
		}
		err = c.device.Run(ctx, true, func(s tensor.Session) error {
			s.Scatter(grown, old, rows)
			s.CopyOut(make([]float32, 1), grown.SliceRows(0, 1).SliceCols(0, 1)) // wait for it
			return nil
		})
		if err != nil {
			return err
		}
	}
	c.matrix = grown
	return nil
}

// bytes returns the memory of the cache.
func (c *cache) bytes() int {
	c.mu.RLock()
	defer c.mu.RUnlock()
	return 4 * c.matrix.Rows * c.matrix.Cols
}

// sequence is a lm.Sequence.
type sequence struct {
	of *Model // it is in the cache of that
	*lm.Span
}

func (s *sequence) Fork() lm.Sequence { return &sequence{s.of, s.Span.Fork()} }
