package command

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/meander-rl/meander/pkg/bus/bustest"
)

// reportOf is the page that the command line writes, without the bytes of its images.
func reportOf(t *testing.T, name string, args ...string) string {
	t.Helper()
	expect(t, exitOK, name+": ", append([]string{"report", "--out", name}, args...)...)
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	page := string(data)
	for _, never := range []string{"@import", "url(", "<link", "<iframe", "<img"} {
		if strings.Contains(page, never) {
			t.Errorf("%s has %q in it", name, never)
		}
	}
	if n := strings.Count(page, "<script"); n != 3 { // data, import map and what starts
		t.Errorf("%s has %d scripts", name, n)
	}
	const policy = `content="default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'; script-src data: 'sha256-`
	if !strings.Contains(page, policy) {
		t.Errorf("%s has no policy against resources of others", name)
	}
	return regexp.MustCompile(`(base64,)[^"]+`).ReplaceAllString(page, "$1...")
}

// must checks that a page has these texts.
func must(t *testing.T, page string, texts ...string) {
	t.Helper()
	for _, want := range texts {
		if !strings.Contains(page, want) {
			t.Errorf("no %q in\n%s", want, page)
		}
	}
}

// A report has the prompts as text, whatever they say, the images as stored, and says what it leaves out.
func TestReport(t *testing.T) {
	inEmptyDir(t)
	var prompts strings.Builder
	const hostile = `</h3><script>alert(1)</script><img src=x onerror=\"alert(1)\">`
	for i, text := range []string{"a red fox", hostile, "an owl"} {
		fmt.Fprintf(&prompts, "{\"prompt\": \"%s\", \"uid\": \"p%d\"}\n", text, i)
	}
	if err := os.WriteFile("p.jsonl", []byte(prompts.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	expect(t, exitOK, "3 of 3 groups complete", append([]string{"run", "--run", "r1"}, small...)...)

	page := reportOf(t, "all.html", "r1")
	must(t, page, "<title>Run r1</title>", `"value":"3: 3 complete"`, `"value":"6: 6 scored"`, `"value":"synthetic"`,
		`"prompt":"a red fox"`, `"name":"Policy version","value":"0"`, `"name":"Rewards of samples","value":"6: mean `,
		`\u003c/h3\u003e\u003cscript\u003ealert(1)\u003c/script\u003e\u003cimg src=x onerror=\"alert(1)\"\u003e`)
	if n := strings.Count(page, "data:image/png;base64,"); n != 6 || strings.Contains(page, "eft out:") {
		t.Errorf("%d of 6 images as stored, and perhaps something is left out", n)
	}

	if strings.Contains(page, "://") {
		t.Error("the page names an address")
	}

	page = reportOf(t, "two.html", "r1", "--groups", "2", "--image-bytes", "8KiB")
	must(t, page, "Groups left out: 1 of 3. The 2 that closed last are here.", "Images reduced to JPEG: ",
		"All images and sounds together take 8KiB at most")
	if n := strings.Count(page, `"estimator":`); n != 2 || !strings.Contains(page, "data:image/jpeg") {
		t.Errorf("%d of 2 groups, with images as JPEG", n)
	}
	expect(t, exitOK, "", "rescore", "--run", "r1", "--pass", "p1", "--reward", "jpeg_compressibility", "--out", "-")
	must(t, reportOf(t, "pass.html", "p1"), `"value":"run r1, which has the prompts and the samples"`)
	lines := linesOf(t, expect(t, exitOK, "", "report", "r1", "--out", "two.html", "--image-bytes", "1B", "--json"))
	if len(lines) != 1 || lines[0]["images_left_out"] != 6.0 || lines[0]["images"] != 0.0 || lines[0]["groups"] != 3.0 {
		t.Errorf("without room for images: %v", lines)
	}
}

// Samples without a reward have their reason, and a run of which nothing has closed has a page.
func TestReport_Failures(t *testing.T) {
	bustest.Sequential(t, others)
	inEmptyDir(t)
	prompt := `{"prompt": "a fox", "uid": "p", "reward": [{"name": "http:fails"}]}`
	if err := os.WriteFile("p.jsonl", []byte(prompt), 0o600); err != nil {
		t.Fatal(err)
	}
	file := "http:\n  fails:\n    url: http://127.0.0.1:9/score\n"
	if err := os.WriteFile("scorers.yaml", []byte(file), 0o600); err != nil {
		t.Fatal(err)
	}
	args := append([]string{"run", "--run", "r1", "--scorers", "scorers.yaml", "--score-patience", "1s"}, small...)
	if _, stderr, err := command(t.Context(), args...); err == nil {
		t.Fatalf("complete, with a reward function that is away: %s", stderr)
	}
	page := reportOf(t, "r1.html", "r1")
	must(t, page, `"name":"Outcome","value":"failed"`, `"status":"failed","error":"`)
}

// The answers of texts are text, and are shown beside what the reward function saw.
func TestReport_Texts(t *testing.T) {
	inEmptyDir(t)
	expect(t, exitOK, "1 of 1 groups complete", "run", "--run", "r1", "--model", "sums", "-n", "2", "--out", "-",
		"3+4=?")
	page := reportOf(t, "r1.html", "r1")
	must(t, page, `"prompt":"3+4=?"`, `"answer":"`, `"name":"numeric_match"`)
	if strings.Contains(page, "data:image") {
		t.Error("a text has an image")
	}
}

// What cannot be reported, or not be written, is refused, and a file that is there stays as it is.
func TestReport_Refused(t *testing.T) {
	bustest.Sequential(t, others)
	inStore(t)
	expect(t, exitFailed, `run "nowhere": nothing is stored of it`, "report", "nowhere")
	expect(t, exitUsage, "RUN: ", "report", "a b")
	expect(t, exitUsage, "must be 'meander report RUN'", "report")
	expect(t, exitUsage, "--groups: 0; must be between 1 and 1000", "report", "r1", "--groups", "0")
	expect(t, exitUsage, "--image-bytes: 0", "report", "r1", "--image-bytes", "0")
	out := func(name string) []string { return []string{"report", "r1", "--out", name} }
	expect(t, exitUsage, "meander-data is a folder; must be a file that can be written", out("meander-data")...)
	expect(t, exitUsage, "must be a file that can be written", out(filepath.Join("missing", "r1.html"))...)
	expect(t, exitUsage, "no plain file", out(os.DevNull)...)
	if err := os.WriteFile("kept.html", []byte("kept"), 0o400); err != nil {
		t.Fatal(err)
	}
	if f, err := os.OpenFile("kept.html", os.O_WRONLY, 0); err == nil {
		f.Close() // for root every file can be written
	} else {
		expect(t, exitUsage, "must be a file that can be written", out("kept.html")...)
	}
	expect(t, exitFailed, `nothing is stored of it`, "report", "nowhere", "--out", "kept.html")
	if data, err := os.ReadFile("kept.html"); err != nil || string(data) != "kept" {
		t.Errorf("the file that was there is %q: %v", data, err)
	}
	expect(t, exitOK, "r1.html: ", "report", "r1")
	expect(t, exitOK, "r1.html: ", "report", "r1") // in its place
	left, err := filepath.Glob(".meander-*")
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v %v", left, err)
	}
}
