package model

import "testing"

func TestLRU_staysWithinItsLimit(t *testing.T) {
	c := lru[int, string]{limit: 10}
	c.put(1, "a", 4)
	c.put(2, "b", 4)
	if _, ok := c.get(1); !ok { // now 2 is the oldest
		t.Error("1 is gone")
	}
	c.put(3, "c", 4)
	if _, ok := c.get(2); ok {
		t.Error("2 is kept although it is the oldest")
	}
	for _, k := range []int{1, 3} {
		if _, ok := c.get(k); !ok {
			t.Errorf("%d is gone", k)
		}
	}
	if got := c.bytes(); got != 8 {
		t.Errorf("%d bytes held, want 8", got)
	}
	c.put(4, "too large", 11)
	if _, ok := c.get(4); ok || c.bytes() != 8 {
		t.Error("a value beyond the limit is kept")
	}
	c.put(3, "other", 9)
	if v, _ := c.get(3); v != "c" || c.bytes() != 8 {
		t.Errorf("put of a key that is there: %q, %d bytes", v, c.bytes())
	}
}
