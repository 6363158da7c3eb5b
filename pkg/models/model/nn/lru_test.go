package nn

import "testing"

func TestLRU_staysWithinItsLimit(t *testing.T) {
	c := LRU[int, string]{Limit: 10}
	c.Put(1, "a", 4)
	c.Put(2, "b", 4)
	if _, ok := c.Get(1); !ok { // now 2 is the oldest
		t.Error("1 is gone")
	}
	c.Put(3, "c", 4)
	if _, ok := c.Get(2); ok {
		t.Error("2 is kept although it is the oldest")
	}
	for _, k := range []int{1, 3} {
		if _, ok := c.Get(k); !ok {
			t.Errorf("%d is gone", k)
		}
	}
	if got := c.Bytes(); got != 8 {
		t.Errorf("%d bytes held, want 8", got)
	}
	c.Put(4, "too large", 11)
	if _, ok := c.Get(4); ok || c.Bytes() != 8 {
		t.Error("a value beyond the limit is kept")
	}
	c.Put(3, "other", 9)
	if v, _ := c.Get(3); v != "c" || c.Bytes() != 8 {
		t.Errorf("put of a key that is there: %q, %d bytes", v, c.Bytes())
	}
}
