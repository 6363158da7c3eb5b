package scorer_test

import (
	"fmt"
	"strings"
	"syscall"
	"testing"

	"github.com/meander-rl/meander/pkg/scorer"
)

// Ctrl-C on a terminal goes to all processes of its group: tesseract is in none of ours. The version that this one
// says is its group.
func TestOCR_GroupOfItsOwn(t *testing.T) {
	t.Parallel()
	o, err := scorer.NewOCR(scorer.OCRConfig{Path: script(t, `case "$1" in
--version) echo "tesseract 5.$(cut -d' ' -f5 /proc/$$/stat)";;
--list-langs) printf 'List:\neng\n';;
esac
`)})
	if err != nil {
		t.Fatal(err)
	}
	if ours := fmt.Sprintf("-5.%d", syscall.Getpgrp()); strings.HasSuffix(o.Version(), ours) ||
		!strings.HasPrefix(o.Version(), "2-tesseract-5.") {
		t.Errorf("version %s; want another group than ours, %s", o.Version(), ours)
	}
}
