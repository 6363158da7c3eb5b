package command

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/meander-rl/meander/pkg/bus"
	"github.com/meander-rl/meander/pkg/results"
	"github.com/meander-rl/meander/schemas"
	"github.com/meander-rl/meander/services/internal/boot"
	"github.com/meander-rl/meander/services/internal/present"
	"github.com/meander-rl/meander/services/ui"
)

// reportCommand makes the command 'meander report'.
func reportCommand(a *app) *cobra.Command {
	out, groups, images := "", 0, boot.Bytes(ui.DefaultImageBytes)
	c := &cobra.Command{
		Use: "report RUN", Short: "write a run as one HTML page to mail or keep",
		Long: `report writes one HTML file of a run: the page of 'meander ui' with its data inside, what made the run, its
rewards in numbers, and the groups that closed last with their images or texts, rewards, advantages and
readings. The file needs nothing else: no server and no network. What is left out or reduced to keep it
small is said in it; states of denoising and videos are never there.

A file of that name is replaced.`,
		Example: `  meander report night
  meander report night --out results/night.html --groups 20`,
		RunE: a.withBus(func(c *cobra.Command, conn *connection, given []string) error {
			if groups < 1 || groups > ui.MaxGroups {
				return usage(fmt.Errorf("--groups: %d; must be between 1 and %d", groups, ui.MaxGroups))
			}
			if images < 1 || images > 1<<30 {
				return usage(fmt.Errorf("--image-bytes: %v; must be between 1B and 1GiB", images))
			}
			if _, err := storedRun(c.Context(), conn.Bus, given[0]); err != nil {
				return err
			}
			o := ui.ReportOptions{Groups: groups, ImageBytes: int(images), Made: time.Now(), Again: again}
			name, says := cmp.Or(out, given[0]+".html"), c.OutOrStdout()
			put := func(page []byte) error { return replaceFile(name, page) }
			if out == "-" {
				name, says = "stdout", c.ErrOrStderr()
				put = func(page []byte) error {
					_, err := asIs(c.OutOrStdout()).Write(page)
					return err
				}
			} else if err := tryReplace("--out", name); err != nil {
				return usage(err)
			}
			return a.writeReport(c.Context(), conn.Bus, schemas.Run(given[0]), name, o, says, put)
		}),
	}
	c.Flags().StringVar(&out, "out", "", "file to write, - for stdout; default RUN.html")
	c.Flags().IntVar(&groups, "groups", ui.DefaultGroups,
		fmt.Sprintf("how many groups to show, those that closed last; at most %d", ui.MaxGroups))
	c.Flags().TextVar(&images, "image-bytes", images,
		"size limit of all images together; larger ones are reduced to JPEG")
	return c
}

// writeReport writes the page of a run by put, to a place of that name, and prints on out what it wrote. A run without
// groups is an error.
func (a *app) writeReport(
	ctx context.Context, b *bus.Bus, run schemas.Run, name string, o ui.ReportOptions, out io.Writer,
	put func(page []byte) error,
) error {
	read, err := results.Read(ctx, b, run)
	if err != nil {
		return err
	}
	if len(read.Groups) == 0 {
		return fmt.Errorf("run %q has no groups to report; 'meander runs show %s' says what it has", run, run)
	}
	var page bytes.Buffer
	contents, err := ui.WriteReport(ctx, &page, b, read, o)
	if err == nil {
		err = put(page.Bytes())
	}
	if err != nil {
		return err
	}
	size := int64(page.Len())
	if a.json {
		return encode(out, struct {
			File  string `json:"file"`
			Bytes int64  `json:"bytes"`
			*ui.Contents
		}{name, size, contents})
	}
	present.Linef(out, "%s: %s, %s, %s, %s", name, present.Size(size), present.Count(contents.Groups, "group"),
		present.Count(contents.Samples, "sample"), present.Count(contents.Images, "image"))
	for _, left := range []struct {
		n    int
		what string
		how  string
	}{
		{contents.GroupsLeftOut, "group", "left out: see --groups"},
		{contents.SamplesLeftOut, "sample", "left out"},
		{contents.DetailsLeftOut, "sample", "without a page of its own"},
		{contents.Reduced, "image", "reduced: see --image-bytes"},
		{contents.ImagesLeftOut, "image", "left out: see --image-bytes"},
		{contents.ImagesGone, "image", "no longer stored, or unreadable"},
	} {
		if left.n > 0 {
			present.Linef(out, "  %s %s", present.Count(left.n, left.what), left.how)
		}
	}
	return nil
}
