package wire

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"

	"github.com/meander-rl/meander/pkg/safetensors"
)

// Places of a file that a fingerprint has, and bytes of each.
const (
	samples     = 256
	sampleBytes = 1 << 10
)

// Fingerprint is what tells whether host and worker have the same weights, without reading all of them: the SHA-256 in
// hex of the names and sizes of the files of some parts of a folder, and of bytes at 256 places of each.
func Fingerprint(folder *safetensors.Folder, parts []string) (string, error) {
	h := sha256.New()
	for _, part := range parts {
		a, err := folder.Archive(part)
		if err != nil {
			return "", err
		}
		for _, f := range a.Files() {
			size := len(f.Bytes)
			fmt.Fprintf(h, "%s %d\n", f.Name, size)
			for i := range samples {
				at := size * i / samples
				h.Write(f.Bytes[at:min(size, at+sampleBytes)])
			}
		}
		if err := a.Close(); err != nil {
			return "", err
		}
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}
