package results

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"

	"github.com/meander-rl/meander/schemas"
)

// digest covers the content of events, in the order of their keys.
type digest struct{ contents map[string][32]byte }

// add adds an event's content to the digest of a run, under a key that gives it its place. It fails if the event has
// no digest.
func (d *digest) add(key string, e schemas.Event) (err error) {
	if d.contents == nil {
		d.contents = map[string][32]byte{}
	}
	if d.contents[key], err = schemas.ContentDigest(e); err != nil {
		return fmt.Errorf("%s: %w", key, err)
	}
	return nil
}

// String returns the SHA-256 of all added contents in key order, in hex.
func (d *digest) String() string {
	h := sha256.New()
	for _, key := range slices.Sorted(maps.Keys(d.contents)) {
		content := d.contents[key]
		fmt.Fprintf(h, "%s\x00", key)
		h.Write(content[:])
	}
	return hex.EncodeToString(h.Sum(nil))
}
