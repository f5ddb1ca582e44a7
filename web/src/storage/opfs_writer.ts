// opfs_writer.ts: writes files for pages of browsers that let only workers write (Safari before 26).
import { putSync } from "./opfs.ts";
import type { WriteAnswer, WriteOrder } from "./opfs.ts";

async function write({ path, start, content }: WriteOrder): Promise<void> {
  let folder = await navigator.storage.getDirectory();
  for (const part of path.slice(0, -1)) folder = await folder.getDirectoryHandle(part, { create: true });
  await putSync(await folder.getFileHandle(path.at(-1) ?? "", { create: true }), start, [content]);
}

const answer = (told: WriteAnswer): void => self.postMessage(told);

self.onmessage = ({ data }: MessageEvent<WriteOrder>) => {
  write(data).then(
    () => answer({ id: data.id, error: null }),
    (error: unknown) => {
      const { name, message } = error instanceof Error ? error : new Error(String(error));
      answer({ id: data.id, error: { name, message } });
    },
  );
};
